// How a range of elements is partitioned among ranks. The shared-memory backends share this arithmetic.
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

/// This rank's share of [0, count). All shares are equal but the last. They are cut at multiples of 64 elements, so no
/// two ranks write to the same cache line of a result.
inline Range slice_of(std::size_t count, int size, int rank) {
  const auto n = static_cast<std::size_t>(size);
  const std::size_t share = ((count + n - 1) / n + 63) / 64 * 64;
  const std::size_t begin = share * static_cast<std::size_t>(rank);
  return {begin < count ? begin : count, begin + share < count ? begin + share : count};
}

/// The range of a rank's part if the parts are concatenated: even parts (counts is empty) or counts[r] elements of rank
/// r.
inline Range part_of(const std::vector<std::int64_t>& counts, std::int64_t even, int rank) {
  if (counts.empty()) {
    const auto begin = static_cast<std::size_t>(even) * static_cast<std::size_t>(rank);
    return {begin, begin + static_cast<std::size_t>(even)};
  }
  std::size_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
  return {begin, begin + static_cast<std::size_t>(counts[static_cast<std::size_t>(rank)])};
}

/// inputs[i][j]: what rank i sends to j. outputs[j][i]: what j expects from i. Returns an error text that names the
/// first pair that differs; empty if all agree.
std::string all_to_all_mismatch(const std::vector<const std::int64_t*>& inputs,
                                const std::vector<const std::int64_t*>& outputs);

}  // namespace phalanx
