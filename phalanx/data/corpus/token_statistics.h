// Statistics of a stream of token ids, to compare a training loss with.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phalanx/data/token_file.h"

namespace phalanx::data {

/// How often each id occurs in a range of a file opened with its vocab_size; index = id.
std::vector<std::int64_t> token_counts(const TokenFile& tokens, TokenRange range);

/// Entropy, in nats per token, of the distribution given by counts. It is the loss of the best model that sees no
/// context. 0 if nothing was counted.
double unigram_entropy(std::span<const std::int64_t> counts);

inline double unigram_entropy(const TokenFile& tokens, TokenRange range) {
  return unigram_entropy(token_counts(tokens, range));
}

}  // namespace phalanx::data
