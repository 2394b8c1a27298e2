// Normalizer changes a text before a tokenizer splits it: Unicode normal forms, replacements, prefixes.
//
// Normal forms come from utf8proc. Bytes that are not valid UTF-8 pass through every step unchanged.
//
//   Normalizer normalizer({NormalFormStep{NormalForm::nfc}});
//   Normalizer::Scratch scratch = normalizer.make_scratch();
//   Normalizer::Result result = normalizer.apply("e\u0301", scratch);  // result.text == "é"
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "phalanx/data/tokenizer/text_pattern.h"
#include "phalanx/data/tokenizer/tokenizer_steps.h"

namespace phalanx::data {

class Normalizer {
 public:
  /// Throws DataError if a pattern is empty or not valid.
  explicit Normalizer(std::vector<NormalizerStep> steps);

  struct Scratch {
    std::vector<PatternFinder::Scratch> finders;
    std::string text;
    std::string next;
  };
  Scratch make_scratch() const;

  struct Result {
    std::string_view text;      // points into the scratch, or into the input if nothing was changed
    bool cut_at_start = false;  // the text's first characters were removed
  };
  /// Throws DataError if replacements would make the text longer by orders of magnitude, as a hostile file could.
  Result apply(std::string_view text, Scratch& scratch) const;

  bool empty() const { return steps_.empty(); }

 private:
  std::vector<NormalizerStep> steps_;
  std::vector<PatternFinder> finders_;  // one for each ReplaceStep, in order
};

}  // namespace phalanx::data
