#include "phalanx/data/best_fit.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

namespace phalanx::data {

std::vector<std::vector<std::size_t>> best_fit(std::span<const std::int64_t> sizes, std::int64_t capacity) {
  std::vector<std::size_t> longest_first(sizes.size());
  std::iota(longest_first.begin(), longest_first.end(), std::size_t{0});
  std::ranges::stable_sort(longest_first, std::greater{}, [&](std::size_t i) { return sizes[i]; });
  std::vector<std::vector<std::size_t>> rows;
  std::map<std::int64_t, std::vector<std::size_t>> rooms;  // rows by the places that they have left
  for (const std::size_t piece : longest_first) {
    std::int64_t left = capacity;
    std::size_t row = rows.size();
    if (const auto fullest = rooms.lower_bound(sizes[piece]); fullest != rooms.end()) {
      left = fullest->first;
      row = fullest->second.back();
      fullest->second.pop_back();
      if (fullest->second.empty()) rooms.erase(fullest);
    } else {
      rows.emplace_back();
    }
    rows[row].push_back(piece);
    if (left > sizes[piece]) rooms[left - sizes[piece]].push_back(row);
  }
  for (auto& row : rows) std::ranges::sort(row);
  std::ranges::sort(rows);
  return rows;
}

}  // namespace phalanx::data
