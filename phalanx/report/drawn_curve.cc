#include "phalanx/report/drawn_curve.h"

#include <algorithm>
#include <cmath>

namespace phalanx::report {
namespace {

/// Marks the lowest, the highest and the first non-finite value of [begin, end).
void keep_extremes(const std::vector<double>& values, std::size_t begin, std::size_t end, std::vector<bool>& kept) {
  std::size_t low = end, high = end, gap = end;
  for (std::size_t i = begin; i < end; ++i) {
    if (!std::isfinite(values[i])) {
      if (gap == end) gap = i;
      continue;
    }
    if (low == end || values[i] < values[low]) low = i;
    if (high == end || values[i] > values[high]) high = i;
  }
  for (const std::size_t i : {low, high, gap}) {
    if (i < end) kept[i] = true;
  }
}

/// A sum of finite values, and how many there were.
struct FiniteSum {
  double sum = 0;
  std::size_t count = 0;

  static FiniteSum of(double value) { return std::isfinite(value) ? FiniteSum{value, 1} : FiniteSum{}; }
  FiniteSum operator+(const FiniteSum& other) const { return {sum + other.sum, count + other.count}; }
};

}  // namespace

DrawnCurve drawn_curve(const Curve& curve, std::size_t groups) {
  const std::size_t count = curve.steps.size();
  DrawnCurve drawn{.points = curve, .of = count};
  drawn.not_finite =
      static_cast<std::size_t>(std::ranges::count_if(curve.values, [](double value) { return !std::isfinite(value); }));
  if (count <= 2 * groups + 2) return drawn;

  std::vector<bool> kept(count, false);
  kept.front() = kept.back() = true;
  for (std::size_t group = 0; group < groups; ++group) {
    keep_extremes(curve.values, group * count / groups, (group + 1) * count / groups, kept);
  }
  drawn.group_size = (count + groups - 1) / groups;
  drawn.points = {};
  for (std::size_t i = 0; i < count; ++i) {
    if (kept[i]) drawn.points.add(curve.steps[i], curve.values[i]);
  }
  return drawn;
}

Curve moving_mean(const Curve& curve, std::size_t window) {
  // The window reaches over at most two blocks of its own length: to the end of one, and from the begin of the next. So
  // every sum is of this window alone, and a huge value does not spoil the means after it.
  const std::size_t count = curve.values.size(), half = window / 2;
  const auto value_at = [&](std::size_t i) { return FiniteSum::of(curve.values[i]); };
  std::vector<FiniteSum> from_begin(count), to_end(count);
  for (std::size_t i = 0; i < count; ++i) {
    from_begin[i] = i % window == 0 ? value_at(i) : from_begin[i - 1] + value_at(i);
  }
  for (std::size_t i = count; i-- > 0;) {
    to_end[i] = i + 1 == count || (i + 1) % window == 0 ? value_at(i) : value_at(i) + to_end[i + 1];
  }
  Curve means{.steps = curve.steps, .values = curve.values};
  for (std::size_t i = 0; i < count; ++i) {
    if (!std::isfinite(curve.values[i])) continue;
    const std::size_t last = std::min(i + half, count - 1);
    FiniteSum sum = from_begin[last];
    if (i >= half) {
      const std::size_t first = i - half;
      if (first / window != last / window) {
        sum = to_end[first] + sum;
      } else if (first % window != 0) {  // at the end of the curve: one block holds it all
        sum = to_end[first];
      }
    }
    means.values[i] = sum.sum / static_cast<double>(sum.count);
  }
  return means;
}

}  // namespace phalanx::report
