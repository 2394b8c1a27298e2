// Puts pieces into rows of the same size, the longest first: each into the fullest row that still has room for it, else
// into a new row.
//
//   for (const std::vector<std::size_t>& row : best_fit(sizes, 2048)) ...   // numbers of pieces
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace phalanx::data {

/// The pieces of each row in their order, and rows in the order of their first pieces.
/// REQUIRES: each size is from 1 to `capacity`.
std::vector<std::vector<std::size_t>> best_fit(std::span<const std::int64_t> sizes, std::int64_t capacity);

}  // namespace phalanx::data
