// TokenDecoder: from tokens back to text, by the steps of a tokenizer.json's decoder.
//
// What a token becomes depends on nothing but the token and whether it is the first of its text, so a table can hold
// it; only spaces at the start of the text are counted across tokens. This is what makes streaming possible: text is
// given out token by token and is the same as when decoded whole.
//
//   TokenDecoder decoder({ReplaceStep{{"▁"}, " "}, ByteFallbackDecode{}, FuseDecode{}, StripDecode{" ", 1}});
//   decoder.text_of("▁Hello", /*first=*/false);   // " Hello"; strip_start() takes a text's first space away
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "phalanx/data/tokenizer/text_pattern.h"
#include "phalanx/data/tokenizer/tokenizer_steps.h"

namespace phalanx::data {

class TokenDecoder {
 public:
  /// DataError where a pattern is not valid or the steps are in an order that cannot be decoded token by token: after
  /// ByteFallback, ByteLevel or Fuse only Fuse and a Strip of the text's start may come.
  explicit TokenDecoder(std::vector<DecoderStep> steps);

  /// What `token`, as it stands in the vocabulary, becomes: bytes, not always whole characters.
  std::string text_of(std::string_view token, bool first) const;

  /// Whether text_of() depends on `first` for any token.
  bool first_differs() const { return first_differs_; }

  /// How many times strip_content() is taken away from the start of a text, where it stands there.
  std::int64_t strip_count() const { return strip_count_; }
  const std::string& strip_content() const { return strip_content_; }

 private:
  std::vector<DecoderStep> steps_;      // those for each token
  std::vector<PatternFinder> finders_;  // one for each ReplaceStep, in order
  bool first_differs_ = false;
  std::int64_t strip_count_ = 0;
  std::string strip_content_;
};

}  // namespace phalanx::data
