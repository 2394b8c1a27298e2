#include "phalanx/data/corpus/token_statistics.h"

#include <algorithm>
#include <cmath>

#include "phalanx/base/error.h"

namespace phalanx::data {

std::vector<std::int64_t> token_counts(const TokenFile& tokens, TokenRange range) {
  if (tokens.vocab_size() == 0) {  // an id in a hostile file would decide the size of the table
    throw ConfigError(tokens.path() + ": counting tokens needs the file opened with its vocab_size");
  }
  std::vector<std::int64_t> counts(static_cast<std::size_t>(tokens.vocab_size()), 0);
  constexpr std::int64_t kBlock = 1 << 18;  // large enough for a disk
  std::vector<std::int64_t> block;
  for (std::int64_t at = range.begin; at < range.end; at += static_cast<std::int64_t>(block.size())) {
    block.resize(static_cast<std::size_t>(std::min(kBlock, range.end - at)));
    tokens.read(at, block);
    for (const std::int64_t id : block) ++counts[static_cast<std::size_t>(id)];
  }
  return counts;
}

double unigram_entropy(std::span<const std::int64_t> counts) {
  double total = 0.0;
  for (const std::int64_t count : counts) total += static_cast<double>(count);
  if (total == 0.0) return 0.0;
  double entropy = 0.0;
  for (const std::int64_t count : counts) {
    if (count > 0) entropy -= static_cast<double>(count) / total * std::log(static_cast<double>(count) / total);
  }
  return entropy;
}

}  // namespace phalanx::data
