#include "phalanx/data/blend_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::data::blend_schedule_test {
namespace {

using Shares = std::vector<std::int64_t>;

std::string refusal(const std::vector<double>& weights, const std::vector<std::string>& names = {}) {
  return error_text<ConfigError>([&] { BlendSchedule schedule(weights, names); });
}

TEST(BlendSchedule, SharesAreWholeNumbersOfAPeriod) {
  EXPECT_EQ(BlendSchedule({0.7, 0.2, 0.1}).shares(), (Shares{7, 2, 1}));
  EXPECT_EQ(BlendSchedule({1, 1, 1}).shares(), (Shares{1, 1, 1})) << "whole weights are taken as they are";
  EXPECT_EQ(BlendSchedule({4, 2}).shares(), (Shares{2, 1}));
  EXPECT_EQ(BlendSchedule({5}).shares(), (Shares{1}));
  EXPECT_EQ(BlendSchedule({0.3333, 0.3333, 0.3333}).shares(), (Shares{3334, 3333, 3333})) << "of their sum";
  EXPECT_EQ(BlendSchedule({1e308, 1e308, 1.0e308}).shares(), (Shares{3334, 3333, 3333}));
  EXPECT_EQ(BlendSchedule({0.1, 0.2, 0.3, 0.4}).shares(), (Shares{1, 2, 3, 4}));
}

TEST(BlendSchedule, EverySetHasItsShareOfEveryFirstRowsToLessThanOneRow) {
  const std::vector<std::vector<double>> blends = {{0.7, 0.2, 0.1},          {1, 1},
                                                   {0.9999, 0.0001},         {0.51, 0.25, 0.13, 0.07, 0.04},
                                                   {3, 5, 7, 11, 13, 17, 2}, std::vector<double>(40, 0.17),
                                                   {9990, 1, 1, 1, 1, 1, 5}, {0.34, 0.33, 0.32, 0.005, 0.0049, 0.0001}};
  for (const std::vector<double>& weights : blends) {
    const BlendSchedule schedule(weights);
    const Shares& shares = schedule.shares();
    ASSERT_EQ(std::accumulate(shares.begin(), shares.end(), std::int64_t{0}), schedule.period());
    Shares taken(shares.size(), 0);
    for (std::int64_t row = 0; row < 2 * schedule.period() + 3; ++row) {
      const BlendSchedule::Row of_row = schedule.row(row);
      auto& count = taken[static_cast<std::size_t>(of_row.set)];
      ASSERT_EQ(of_row.number, count) << "rows of a set are taken in their order, each once";
      ++count;
      for (std::size_t set = 0; set < shares.size(); ++set) {
        const double due = static_cast<double>((row + 1) * shares[set]) / static_cast<double>(schedule.period());
        ASSERT_LT(std::abs(static_cast<double>(taken[set]) - due), 1) << "row " << row << ", set " << set;
      }
      if (row % 997 == 0) {
        ASSERT_EQ(schedule.counts(row + 1), taken);
      }
    }
  }
}

TEST(BlendSchedule, RowsFarAwayCostNothing) {
  const BlendSchedule schedule({0.7, 0.2, 0.1});
  const std::int64_t far = 10'000'000'000'000;
  EXPECT_EQ(schedule.counts(far), (Shares{far / 10 * 7, far / 10 * 2, far / 10}));
  EXPECT_EQ(schedule.row(far), (BlendSchedule::Row{0, far / 10 * 7}));
}

TEST(BlendSchedule, WeightsThatCannotBeMetAreErrors) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinite = std::numeric_limits<double>::infinity();
  EXPECT_THAT(refusal({}), HasSubstr("no data sets"));
  for (const double wrong : {0.0, -1.0, nan, infinite}) {
    EXPECT_THAT(refusal({1, wrong}, {"web", "code"}),
                AllOf(HasSubstr("data set 'code' has the weight"), HasSubstr("expected a number above 0")));
  }
  EXPECT_THAT(refusal({1, 1e-5}, {"web", "code"}),
              AllOf(HasSubstr("'code'"), HasSubstr("less than one row in 10000"), HasSubstr("at least 0.0001")));
}

}  // namespace
}  // namespace phalanx::data::blend_schedule_test
