// What a tokenizer makes of a text, a line a token: `phalanx tokenize --show`.
#pragma once

#include <string>
#include <string_view>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::cli {

/// Lines of id and token, with the tokens that the tokenizer puts around a text, then one of their number.
std::string shown_tokens(const data::BpeTokenizer& tokenizer, std::string_view text);

}  // namespace phalanx::cli
