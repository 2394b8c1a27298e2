// Where in a text its tokens stand.
//
//   const std::string text = "Hi there";
//   const auto places = token_places(tokenizer, text, tokenizer.encode(text));   // {0, 2}, {2, 8}
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "phalanx/data/jinja/template.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {

/// The bytes of `text` that each token stands for, in order; together they are all of it, but for white space that an
/// added token takes with it. The space that a tokenizer puts before a text has no place: its token may be empty.
/// REQUIRES: `ids` are those of `text`, without special tokens added.
/// Throws DataError that names the first token whose bytes do not stand there: an unknown token, or a normalizer that
/// changes the text.
std::vector<jinja::TextSpan> token_places(const BpeTokenizer& tokenizer, std::string_view text,
                                          std::span<const TokenId> ids);

}  // namespace phalanx::data
