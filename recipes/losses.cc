#include "recipes/losses.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace recipe {

double print_losses(const std::vector<Losses>& ways) {
  double worst = 0;
  for (std::size_t step = 0; step < ways.back().values.size(); ++step) {
    std::vector<std::string> texts;
    const double expected = ways.back().values[step];
    for (const Losses& way : ways) {
      texts.push_back(fmt::format("{} {:.7f}", way.name, way.values[step]));
      const double difference = std::abs(way.values[step] - expected) / std::abs(expected);
      worst = std::isfinite(difference) ? std::max(worst, difference) : std::numeric_limits<double>::infinity();
    }
    fmt::print("step {}: {}\n", step + 1, fmt::join(texts, ", "));
  }
  return worst;
}

bool print_beside_one_rank(int ranks, const std::vector<Losses>& ways) {
  const double apart = print_losses(ways);
  const bool is_same = apart < 1e-5;
  fmt::print("{} rank(s): losses differ from one rank's by {:.1e}: {}\n", ranks, apart, verdict(is_same));
  return is_same;
}

const char* verdict(bool same) { return same ? "the same" : "NOT the same"; }

}  // namespace recipe
