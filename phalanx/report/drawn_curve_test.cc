#include "phalanx/report/drawn_curve.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "phalanx/base/testing/matchers.h"

namespace phalanx::report {
namespace {

Curve curve_of(const std::vector<double>& values) {
  Curve curve;
  for (std::size_t i = 0; i < values.size(); ++i) curve.add(static_cast<std::int64_t>(i) + 1, values[i]);
  return curve;
}

TEST(DrawnCurve, AShortCurveIsDrawnAsItIs) {
  const DrawnCurve drawn = drawn_curve(curve_of({3, NAN, 1}), 10);
  EXPECT_THAT(drawn.points.steps, ElementsAre(1, 2, 3));
  EXPECT_EQ(drawn.group_size, 1U);
  EXPECT_EQ(drawn.of, 3U);
  EXPECT_EQ(drawn.not_finite, 1U);
  EXPECT_TRUE(drawn_curve({}).points.empty());
}

TEST(DrawnCurve, KeepsTheExtremesOfEachGroupAndBothEnds) {
  const DrawnCurve drawn = drawn_curve(curve_of({5, 9, 1, 6, 5, 2, 8, 5, 5, 5, 5, 4}), 3);
  EXPECT_THAT(drawn.points.steps, ElementsAre(1, 2, 3, 6, 7, 9, 12));
  EXPECT_THAT(drawn.points.values, ElementsAre(5, 9, 1, 2, 8, 5, 4));
  EXPECT_EQ(drawn.group_size, 4U);
  EXPECT_EQ(drawn.of, 12U);
}

TEST(DrawnCurve, EveryPointIsOneOfTheCurveAndNoPeakIsLost) {
  std::mt19937 random(1);
  std::vector<double> values(1'000'000);
  for (double& value : values) value = static_cast<double>(random() % 1000);
  values[123'456] = 1e9;
  values[654'321] = -1e9;
  values[777'777] = INFINITY;
  const Curve curve = curve_of(values);
  const DrawnCurve drawn = drawn_curve(curve);
  EXPECT_LE(drawn.points.steps.size(), 3 * kGroups);
  EXPECT_EQ(drawn.group_size, 1000U);
  EXPECT_EQ(drawn.not_finite, 1U);
  EXPECT_TRUE(std::ranges::is_sorted(drawn.points.steps, std::less_equal<>()));
  EXPECT_EQ(drawn.points.steps.front(), 1);
  EXPECT_EQ(drawn.points.steps.back(), 1'000'000);
  for (std::size_t i = 0; i < drawn.points.steps.size(); ++i) {
    ASSERT_EQ(drawn.points.values[i], values[static_cast<std::size_t>(drawn.points.steps[i]) - 1]);
  }
  for (std::size_t group = 0; group < kGroups; ++group) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(group * 1000);
    for (const double peak : {*std::min_element(begin, begin + 1000), *std::max_element(begin, begin + 1000)}) {
      ASSERT_TRUE(std::ranges::count(drawn.points.values, peak) > 0) << group;
    }
  }
}

TEST(DrawnCurve, AGapStaysWhereItIs) {
  std::vector<double> values(100, 1.0);
  values[40] = values[41] = NAN;
  const DrawnCurve drawn = drawn_curve(curve_of(values), 10);
  const auto gap = std::ranges::find(drawn.points.steps, 41);
  ASSERT_NE(gap, drawn.points.steps.end());
  EXPECT_TRUE(std::isnan(drawn.points.values[static_cast<std::size_t>(gap - drawn.points.steps.begin())]));
  EXPECT_EQ(drawn.not_finite, 2U);
}

TEST(MovingMean, IsTheMeanOfThePointsAround) {
  EXPECT_DOUBLE_EQ(moving_mean(curve_of({5, 5, 5}), 11).values[2], 5.0);
  EXPECT_THAT(moving_mean(curve_of({1, 2, 6, 7, 20, 3}), 3).values, ElementsAre(1.5, 3, 5, 11, 10, 11.5));
  EXPECT_THAT(moving_mean(curve_of({1, 2, 6}), 1).values, ElementsAre(1, 2, 6));
  EXPECT_TRUE(moving_mean({}, 3).empty());
}

TEST(MovingMean, AgreesWithSumsOneByOne) {
  std::mt19937 random(2);
  for (const std::size_t count : {1U, 2U, 6U, 7U, 8U, 13U, 14U, 15U, 100U}) {
    std::vector<double> values(count);
    for (double& value : values) value = random() % 5 == 0 ? NAN : static_cast<double>(random() % 100);
    const Curve means = moving_mean(curve_of(values), 7);
    for (std::size_t i = 0; i < count; ++i) {
      double sum = 0, finite = 0;
      for (std::size_t j = i < 3 ? 0 : i - 3; j < std::min(i + 4, count); ++j) {
        if (std::isfinite(values[j])) sum += values[j], finite += 1;
      }
      ASSERT_EQ(std::isfinite(values[i]), std::isfinite(means.values[i]));
      ASSERT_NEAR(std::isfinite(values[i]) ? means.values[i] : 0, std::isfinite(values[i]) ? sum / finite : 0, 1e-9)
          << count << " " << i;
    }
  }
}

TEST(MovingMean, AHugeValueDoesNotSpoilTheMeansAfterIt) {
  std::vector<double> values(50, 1.0);
  values[5] = 1e30;
  EXPECT_EQ(moving_mean(curve_of(values), 3).values[7], 1.0);
}

}  // namespace
}  // namespace phalanx::report
