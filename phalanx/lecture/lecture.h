// The lecture: writes sections as Markdown, with the outputs of their steps and the code of the recipes in place.
//
//   for (const Section* section : chosen_sections({"ring"})) {
//     const WrittenSection written = write_section(*section, {.ranks = 4});
//     fmt::print("{}", terminal_text(written.markdown));
//   }
#pragma once

#include <string>
#include <vector>

#include "phalanx/lecture/sections.h"
#include "phalanx/lecture/stage.h"

namespace phalanx::lecture {

struct WrittenSection {
  const Section* section = nullptr;
  std::string markdown;          // with the text of its pictures
  std::string picture_markdown;  // with "```picture I" in their place, for pictures[I]
  std::vector<std::vector<Picture>> pictures;
  bool all_hold = true;  // all checks
};

/// Runs the section's steps. Throws what they throw, and Error for a directive that names nothing.
WrittenSection write_section(const Section& section, const StageOptions& options);

/// Those with these ids, in the lecture's order; all if there are none. Throws UsageError for an unknown id.
std::vector<const Section*> chosen_sections(const std::vector<std::string>& ids);

/// "part 1  collectives  The collectives", a line for each.
std::string list_of_sections();

/// Of the section's part: "Part 1: machines and messages".
std::string part_title(const Section& section);

/// Markdown for a terminal: headings underlined, code and output indented, links and strong words as their text.
std::string terminal_text(const std::string& markdown);

/// How the page begins: what it is, and when and where its numbers were measured, which is now and here.
std::string opening();

/// All of docs/lecture.md.
std::string markdown_page(const std::vector<WrittenSection>& written);

}  // namespace phalanx::lecture
