// Normalizer: what a tokenizer does to a text before it is split: Unicode normal forms, replacements, prefixes.
//
// Normal forms come from utf8proc. Bytes that are no valid UTF-8 pass through every step unchanged.
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
  /// DataError where a pattern is empty or not valid.
  explicit Normalizer(std::vector<NormalizerStep> steps);

  struct Scratch {
    std::vector<PatternFinder::Scratch> finders;
    std::string text;
    std::string next;
  };
  Scratch make_scratch() const;

  struct Result {
    std::string_view text;      // of the scratch, or the text given where nothing was changed
    bool cut_at_start = false;  // the text's first characters are gone
  };
  /// DataError where replacements would make a text of another order of length, as those of a hostile file do.
  Result apply(std::string_view text, Scratch& scratch) const;

  bool empty() const { return steps_.empty(); }

 private:
  std::vector<NormalizerStep> steps_;
  std::vector<PatternFinder> finders_;  // one for each ReplaceStep, in order
};

}  // namespace phalanx::data
