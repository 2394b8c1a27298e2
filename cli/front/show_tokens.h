// The tokens of a text, one per line: `phalanx tokenize --show`.
#pragma once

#include <string>
#include <string_view>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::cli {

/// One line per token with its id and text, including the tokens that the tokenizer puts around a text. The last line
/// is the number of tokens.
std::string shown_tokens(const data::BpeTokenizer& tokenizer, std::string_view text);

}  // namespace phalanx::cli
