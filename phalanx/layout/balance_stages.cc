#include "phalanx/layout/balance_stages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "phalanx/base/error.h"

namespace phalanx {

std::vector<int> balance_stages(const std::vector<double>& costs, int stages) {
  const int count = static_cast<int>(costs.size());
  if (stages < 1 || count < stages) {
    throw Error(fmt::format(
        "balance_stages: {} parts cannot be divided into {} stages; expected 1 to {} stages, each with a part", count,
        stages, count));
  }
  std::vector<double> before(costs.size() + 1, 0.0);  // the sum of the first i costs
  for (int i = 0; i < count; ++i) {
    const double cost = costs[static_cast<std::size_t>(i)];
    if (!(cost >= 0.0) || !std::isfinite(cost)) {
      throw Error(fmt::format("balance_stages: part {} costs {}; expected a number that is not negative", i, cost));
    }
    before[static_cast<std::size_t>(i) + 1] = before[static_cast<std::size_t>(i)] + cost;
  }
  const auto sum = [&](int from, int to) {
    return before[static_cast<std::size_t>(to)] - before[static_cast<std::size_t>(from)];
  };
  // largest[s][i]: the largest stage cost of the best division of the parts from i on into s stages.
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> largest(static_cast<std::size_t>(stages) + 1,
                                           std::vector<double>(costs.size() + 1, kNone));
  largest[0][costs.size()] = 0.0;
  for (int s = 1; s <= stages; ++s) {
    for (int i = 0; i <= count - s; ++i) {
      double& best = largest[static_cast<std::size_t>(s)][static_cast<std::size_t>(i)];
      for (int to = i + 1; to <= count - s + 1; ++to) {
        best = std::min(best,
                        std::max(sum(i, to), largest[static_cast<std::size_t>(s) - 1][static_cast<std::size_t>(to)]));
      }
    }
  }
  const double limit = largest[static_cast<std::size_t>(stages)][0];
  std::vector<int> result;
  for (int from = 0, s = stages; s > 0; --s) {
    int to = count - s + 1;
    while (to > from + 1 &&
           (sum(from, to) > limit || largest[static_cast<std::size_t>(s) - 1][static_cast<std::size_t>(to)] > limit)) {
      --to;
    }
    result.push_back(to - from);
    from = to;
  }
  return result;
}

}  // namespace phalanx
