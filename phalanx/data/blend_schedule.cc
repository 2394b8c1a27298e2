#include "phalanx/data/blend_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "phalanx/base/error.h"

namespace phalanx::data {
namespace {

constexpr std::int64_t kParts = 10000;

std::int64_t up(std::int64_t dividend, std::int64_t divisor) { return (dividend + divisor - 1) / divisor; }

std::string name_of(const std::vector<std::string>& names, std::size_t set) {
  return set < names.size() ? fmt::format("'{}'", names[set]) : fmt::format("number {}", set + 1);
}

/// Shares of kParts rows.
std::vector<std::int64_t> rounded(const std::vector<double>& weights) {
  const double largest = *std::ranges::max_element(weights);  // the sum of all might be infinite
  double sum = 0;
  for (const double weight : weights) sum += weight / largest;
  std::vector<std::int64_t> shares;
  std::vector<double> remainders;
  for (const double weight : weights) {
    const double exact = weight / largest / sum * static_cast<double>(kParts);
    // 0.1 / 1.0 must give 1000, not 999 and a remainder of nearly 1.
    const double whole = std::floor(exact + 1e-6);
    shares.push_back(static_cast<std::int64_t>(whole));
    remainders.push_back(exact - whole);
  }
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater{}, [&](std::size_t set) { return remainders[set]; });
  std::int64_t left = kParts - std::accumulate(shares.begin(), shares.end(), std::int64_t{0});
  for (const std::size_t set : order) {
    if (left-- <= 0) break;
    ++shares[set];
  }
  return shares;
}

}  // namespace

BlendSchedule::BlendSchedule(const std::vector<double>& weights, const std::vector<std::string>& names) {
  if (weights.empty()) throw ConfigError("a blend of no data sets: expected one or more");
  for (std::size_t set = 0; set < weights.size(); ++set) {
    if (std::isfinite(weights[set]) && weights[set] > 0) continue;
    throw ConfigError(
        fmt::format("data set {} has the weight {}: expected a number above 0; leave out a set of which "
                    "nothing is to be read",
                    name_of(names, set), weights[set]));
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const bool are_whole = sum <= static_cast<double>(kParts) &&
                         std::ranges::all_of(weights, [](double weight) { return weight == std::floor(weight); });
  if (are_whole) {
    for (const double weight : weights) shares_.push_back(static_cast<std::int64_t>(weight));
  } else {
    shares_ = rounded(weights);
  }
  for (std::size_t set = 0; set < weights.size(); ++set) {
    if (shares_[set] > 0) continue;
    throw ConfigError(
        fmt::format("data set {} has the weight {} of {} in all: less than one row in {}; expected at least {:.6g}, or "
                    "no such set",
                    name_of(names, set), weights[set], sum, kParts, sum / static_cast<double>(kParts)));
  }
  std::int64_t divisor = 0;
  for (const std::int64_t share : shares_) divisor = std::gcd(divisor, share);
  for (std::int64_t& share : shares_) share /= divisor;

  // The j-th row of a set (from 1) may come at (j - 1) period / share, rounded down, at the earliest, and must come
  // before j period / share, rounded up. The earliest deadline first meets all of them,
  // as the shares sum to the period.
  const std::int64_t period = std::accumulate(shares_.begin(), shares_.end(), std::int64_t{0});
  std::vector<std::int64_t> taken(shares_.size(), 0);
  for (std::int64_t row = 0; row < period; ++row) {
    std::size_t best = shares_.size();
    std::int64_t best_deadline = 0;
    for (std::size_t set = 0; set < shares_.size(); ++set) {
      if (taken[set] == shares_[set] || taken[set] * period / shares_[set] > row) continue;
      const std::int64_t deadline = up((taken[set] + 1) * period, shares_[set]);
      if (best == shares_.size() || deadline < best_deadline) {
        best = set;
        best_deadline = deadline;
      }
    }
    sets_.push_back(static_cast<std::uint16_t>(best));
    numbers_.push_back(static_cast<std::int32_t>(taken[best]++));
  }
}

BlendSchedule::Row BlendSchedule::row(std::int64_t row) const {
  const auto place = static_cast<std::size_t>(row % period());
  const std::int64_t set = sets_[place];
  return {.set = set, .number = row / period() * shares_[static_cast<std::size_t>(set)] + numbers_[place]};
}

std::vector<std::int64_t> BlendSchedule::counts(std::int64_t rows) const {
  std::vector<std::int64_t> counts;
  for (const std::int64_t share : shares_) counts.push_back(rows / period() * share);
  for (std::int64_t place = 0; place < rows % period(); ++place) ++counts[sets_[static_cast<std::size_t>(place)]];
  return counts;
}

}  // namespace phalanx::data
