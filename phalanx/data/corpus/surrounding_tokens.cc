#include "phalanx/data/corpus/surrounding_tokens.h"

#include "phalanx/data/tokenizer/bpe_model.h"

namespace phalanx::data {

SurroundingTokens surrounding_tokens(const BpeTokenizer& tokenizer, const SurroundingOptions& options) {
  SurroundingTokens around;
  if (options.special_tokens) around = {.before = tokenizer.model().prefix, .after = tokenizer.model().suffix};
  if (!options.end) return around;
  if (around.after.empty() || around.after.back() != *options.end) around.after.push_back(*options.end);
  return around;
}

}  // namespace phalanx::data
