// How a range of elements is cut among ranks: the arithmetic that the shared-memory backends have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace phalanx {

struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t size() const { return end - begin; }
};

/// Rank's share of [0, count): equal but for the last, cut at multiples of 64 elements so that no two ranks write one
/// cache line of a result.
inline Range slice_of(std::size_t count, int size, int rank) {
  const auto n = static_cast<std::size_t>(size);
  const std::size_t share = ((count + n - 1) / n + 63) / 64 * 64;
  const std::size_t begin = share * static_cast<std::size_t>(rank);
  return {begin < count ? begin : count, begin + share < count ? begin + share : count};
}

/// Rank's part where the parts lie one after the other: even (counts empty) or as counted.
inline Range part_of(const std::vector<std::int64_t>& counts, std::int64_t even, int rank) {
  if (counts.empty()) {
    const auto begin = static_cast<std::size_t>(even) * static_cast<std::size_t>(rank);
    return {begin, begin + static_cast<std::size_t>(even)};
  }
  std::size_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
  return {begin, begin + static_cast<std::size_t>(counts[static_cast<std::size_t>(rank)])};
}

/// inputs[i][j]: what rank i sends to j; outputs[j][i]: what j expects of i. The error text, naming the first pair that
/// differs; empty if all agree.
std::string all_to_all_mismatch(const std::vector<const std::int64_t*>& inputs,
                                const std::vector<const std::int64_t*>& outputs);

}  // namespace phalanx
