// TokenDecoder converts tokens back to text, by the steps of a tokenizer.json's decoder.
//
// The text of a token depends only on the token and on whether it is the first of its text, so a table can hold it.
// Only spaces at the start of the text are counted across tokens. This makes streaming possible: text that is output
// token by token is the same as text that is decoded whole.
//
//   TokenDecoder decoder({ReplaceStep{{"▁"}, " "}, ByteFallbackDecode{}, FuseDecode{}, StripDecode{" ", 1}});
//   decoder.text_of("▁Hello", /*first=*/false);   // " Hello"; the caller strips a text's first space (strip_count())
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "phalanx/data/tokenizer/text_pattern.h"
#include "phalanx/data/tokenizer/tokenizer_steps.h"

namespace phalanx::data {

class TokenDecoder {
 public:
  /// Throws DataError if a pattern is not valid, or if the steps cannot be decoded token by token in their order: after
  /// ByteFallback, ByteLevel or Fuse only Fuse and a Strip of the text's start may come.
  explicit TokenDecoder(std::vector<DecoderStep> steps);

  /// The text of `token`, which is given as in the vocabulary: bytes, not always whole characters.
  std::string text_of(std::string_view token, bool first) const;

  /// Whether text_of() depends on `first` for any token.
  bool first_differs() const { return first_differs_; }

  /// How many times strip_content() is removed from the start of a text that begins with it.
  std::int64_t strip_count() const { return strip_count_; }
  const std::string& strip_content() const { return strip_content_; }

 private:
  std::vector<DecoderStep> steps_;      // those that apply to each token
  std::vector<PatternFinder> finders_;  // one for each ReplaceStep, in order
  bool first_differs_ = false;
  std::int64_t strip_count_ = 0;
  std::string strip_content_;
};

}  // namespace phalanx::data
