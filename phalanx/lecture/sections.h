// The sections of the lecture, in order: their texts, and what their steps run and draw.
//
// A text is Markdown (text/*.txt; links are relative to docs/) with directives, each a line of its own:
//
//   @run NAME                    the output of a step, which runs on a Stage
//   @code FILE NAME              a function of a source (excerpt.h)
//   @code FILE NAME LAST         from one function to another
//   @lines FILE FIRST ... LAST   lines of a source, from one that contains FIRST to one that contains LAST
//
// After the code of a recipe comes the first command of its first comment. A block fenced with sh holds commands, which
// scripts/lecture_commands.py runs as they are.
#pragma once

#include <string_view>
#include <vector>

#include "phalanx/lecture/sources.h"
#include "phalanx/lecture/stage.h"

namespace phalanx::lecture {

struct Section {
  std::string_view id;
  int part = 1;
  const EmbeddedText* text;
  std::string_view title() const;  // the text's first heading
};
const std::vector<Section>& sections();

struct Step {
  std::string_view name;
  void (*run)(Stage&);
};
const std::vector<Step>& steps();

struct Source {
  std::string_view file;  // from the root of the repository
  const EmbeddedText* text;
};
const std::vector<Source>& sources();

}  // namespace phalanx::lecture
