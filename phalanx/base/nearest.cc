#include "phalanx/base/nearest.h"

#include <algorithm>
#include <limits>

#include "phalanx/base/parse_text.h"

namespace phalanx {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  const std::string left = lower_case(a);
  const std::string right = lower_case(b);
  // Three rows of the table of distances between prefixes: two ago (for swaps), previous, current.
  std::vector<std::size_t> before(right.size() + 1);
  std::vector<std::size_t> previous(right.size() + 1);
  std::vector<std::size_t> current(right.size() + 1);
  for (std::size_t j = 0; j <= right.size(); ++j) current[j] = j;
  for (std::size_t i = 1; i <= left.size(); ++i) {
    std::swap(before, previous);
    std::swap(previous, current);
    current[0] = i;
    for (std::size_t j = 1; j <= right.size(); ++j) {
      const std::size_t substitution = previous[j - 1] + (left[i - 1] == right[j - 1] ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, substitution});
      if (i > 1 && j > 1 && left[i - 1] == right[j - 2] && left[i - 2] == right[j - 1]) {
        current[j] = std::min(current[j], before[j - 2] + 1);
      }
    }
  }
  return current[right.size()];
}

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  constexpr std::size_t kMinimumPart = 3;  // shorter parts match by accident
  std::string best;
  std::size_t best_distance = std::numeric_limits<std::size_t>::max();
  const std::string wanted = lower_case(name);
  for (const std::string& candidate : candidates) {
    std::size_t distance = edit_distance(name, candidate);
    const std::size_t longer = std::max(name.size(), candidate.size());
    const bool contained = wanted.size() >= kMinimumPart && lower_case(candidate).find(wanted) != std::string::npos;
    const std::size_t near = longer <= 3 ? 1 : std::max<std::size_t>(2, longer / 3);
    if (contained) distance = std::min(distance, near);
    const bool all_replaced = distance >= longer;
    if (distance > near || all_replaced || distance >= best_distance) continue;
    best = candidate;
    best_distance = distance;
  }
  return best;
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates) {
  const std::string best = nearest(name, candidates);
  return best.empty() ? "" : " (did you mean '" + best + "'?)";
}

}  // namespace phalanx
