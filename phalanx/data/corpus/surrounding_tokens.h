// The tokens that a document gets besides those of its text: what the tokenizer's template puts before and after a
// text, such as <s>, then the token that ends documents.
//
//   const SurroundingTokens around = surrounding_tokens(tokenizer, {.end = tokenizer.end_of_text()});
//   ids.insert(ids.begin(), around.before.begin(), around.before.end());
#pragma once

#include <optional>
#include <vector>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {

struct SurroundingTokens {
  std::vector<TokenId> before, after;
};

struct SurroundingOptions {
  bool special_tokens = true;  // those of the template
  std::optional<TokenId> end;  // unset: nothing ends documents
};

/// The end is there once, also if the template ends texts with it.
SurroundingTokens surrounding_tokens(const BpeTokenizer& tokenizer, const SurroundingOptions& options);

}  // namespace phalanx::data
