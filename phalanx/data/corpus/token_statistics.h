// Figures about a stream of token ids that training is judged against.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phalanx/data/token_file.h"

namespace phalanx::data {

/// Occurrences of each id in a range of a file opened with its vocab_size; index = id.
std::vector<std::int64_t> token_counts(const TokenFile& tokens, TokenRange range);

/// Entropy, in nats a token, of the distribution given by counts: the loss of the best model that sees no context.
/// 0 where nothing was counted.
double unigram_entropy(std::span<const std::int64_t> counts);

inline double unigram_entropy(const TokenFile& tokens, TokenRange range) {
  return unigram_entropy(token_counts(tokens, range));
}

}  // namespace phalanx::data
