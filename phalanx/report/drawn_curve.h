// The points of a curve that a chart draws: few enough for a page that opens at once, and none of them made up.
//
// A long curve is cut into groups of adjacent steps. Of each group the point with the lowest and the one with the
// highest value are kept, so no peak is lost. A step without a finite value is kept as a gap.
//
//   const DrawnCurve drawn = drawn_curve(metrics.curve("loss"));
#pragma once

#include <cstddef>

#include "phalanx/report/metrics_file.h"

namespace phalanx::report {

constexpr std::size_t kGroups = 1000;  // of a chart 1300 pixels wide, each is about one pixel

struct DrawnCurve {
  Curve points;                // at most 3 a group, and both ends; NaN is a gap
  std::size_t of = 0;          // points before
  std::size_t group_size = 1;  // points of the largest group; 1: all points are drawn
  std::size_t not_finite = 0;  // points without a finite value, before
};

/// ENSURES: every point of the result is one of `curve`, by rising steps. The first and the last one, and the lowest
/// and the highest finite value, are among them.
DrawnCurve drawn_curve(const Curve& curve, std::size_t groups = kGroups);

/// At each point the mean of the `window` points around it, of fewer at the ends. Points that are not finite stay so,
/// and count for nothing. REQUIRES: window is odd.
Curve moving_mean(const Curve& curve, std::size_t window);

}  // namespace phalanx::report
