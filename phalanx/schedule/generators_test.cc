#include "phalanx/schedule/generators.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::schedule {
namespace {

std::string generator_error(const ScheduleOptions& options) {
  return error_text<ConfigError>([&] { make_schedule(options); });
}

TEST(Generators, NamesInAnySpelling) {
  EXPECT_EQ(schedule_names().size(), 7U);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"gpipe", "GPipe"},
      {"GPIPE", "GPipe"},
      {"1f1b", "1F1B"},
      {"interleaved-1f1b", "Interleaved1F1B"},
      {"Interleaved", "Interleaved1F1B"},
      {"looped_bfs", "LoopedBFS"},
      {"BFS", "LoopedBFS"},
      {"ZB1P", "InterleavedZeroBubble"},
      {"zb-h1", "InterleavedZeroBubble"},
      {"interleaved zero bubble", "InterleavedZeroBubble"},
      {"ZBV", "ZBVZeroBubble"},
      {"zb-v", "ZBVZeroBubble"},
      {"zbvzerobubble", "ZBVZeroBubble"},
      {"dualpipev", "DualPipeV"},
      {"DualPipe-V", "DualPipeV"},
  };
  for (const auto& [name, full] : cases) {
    EXPECT_EQ(schedule_name(name), full) << name;
    EXPECT_EQ(make_schedule({.name = name, .ranks = 2, .micro_batches = 4}).name, full);
  }
  for (const std::string& name : schedule_names()) EXPECT_EQ(schedule_name(name), name);
  EXPECT_EQ(generator_error({.name = "Interleaved1F1C"}),
            "unknown pipeline schedule 'Interleaved1F1C' (did you mean 'Interleaved1F1B'?): expected one of GPipe, "
            "1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, "
            "or for short afab, interleaved, bfs, zb1p, zbh1, zbv");
  EXPECT_THAT(generator_error({.name = ""}), HasSubstr("unknown pipeline schedule ''"));
}

TEST(Generators, StagesAreLaidOutInLoopsOrInAV) {
  EXPECT_EQ(make_schedule({.name = "1F1B", .ranks = 3, .micro_batches = 3}).rank_of_stage, (std::vector<int>{0, 1, 2}));
  const Schedule loops = make_schedule({.name = "interleaved", .ranks = 2, .stages_per_rank = 3, .micro_batches = 4});
  EXPECT_EQ(loops.rank_of_stage, (std::vector<int>{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(loops.stages_of(1), (std::vector<int>{1, 3, 5}));
  EXPECT_EQ(make_schedule({.name = "ZBV", .ranks = 3, .micro_batches = 3}).rank_of_stage,
            (std::vector<int>{0, 1, 2, 2, 1, 0}));
  // Where nothing is said, each schedule has its usual number of stages.
  for (const std::string& name : schedule_names()) {
    const Schedule schedule = make_schedule({.name = name, .ranks = 2, .micro_batches = 4});
    EXPECT_EQ(schedule.stages(), 2 * usual_stages_per_rank(name)) << name;
    EXPECT_EQ(schedule.micro_batches, 4);
  }
}

TEST(Generators, WrongNumbersNameTheNearestRightOnes) {
  const std::vector<std::pair<ScheduleOptions, std::string>> cases = {
      {{.name = "1f1b", .ranks = 4, .micro_batches = 3},
       "schedule 1F1B: micro-batches >= stages does not hold: 3 < 4, with stages = 4 ranks x 1: expected 4 "
       "micro-batches or more, or 3 ranks at most"},
      {{.name = "DualPipeV", .ranks = 4, .micro_batches = 7},
       "schedule DualPipeV: micro-batches >= stages does not hold: 7 < 8, with stages = 4 ranks x 2: expected 8 "
       "micro-batches or more, or 3 ranks at most"},
      {{.name = "interleaved", .ranks = 4, .micro_batches = 13},
       "schedule Interleaved1F1B: micro-batches % rounds = 0 does not hold: 13 % 3 = 1, with rounds = 13 micro-batches "
       "/ 4 ranks rounded down: expected 12 or 15 micro-batches"},
      {{.name = "ZB1P", .ranks = 2, .micro_batches = 5},
       "schedule InterleavedZeroBubble: micro-batches % rounds = 0 does not hold: 5 % 2 = 1, with rounds = 5 "
       "micro-batches / 2 ranks rounded down: expected 4 or 6 micro-batches"},
      {{.name = "GPipe", .ranks = 4, .stages_per_rank = 2, .micro_batches = 8},
       "schedule GPipe: 2 stages a rank: expected 1 (Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble "
       "and DualPipeV have more)"},
      {{.name = "1F1B", .ranks = 4, .stages_per_rank = 3, .micro_batches = 8}, "3 stages a rank: expected 1"},
      {{.name = "ZBV", .ranks = 4, .stages_per_rank = 1, .micro_batches = 8},
       "schedule ZBVZeroBubble: 1 stages a rank: expected 2, as its stages lie in a V"},
      {{.name = "DualPipeV", .ranks = 2, .stages_per_rank = 4, .micro_batches = 16}, "expected 2, as its stages"},
      {{.name = "GPipe", .ranks = 0, .micro_batches = 8}, "schedule GPipe: 0 ranks: expected 1 to 65536"},
      {{.name = "GPipe", .ranks = 2, .micro_batches = 0}, "schedule GPipe: 0 micro-batches: expected 1 to 65536"},
      {{.name = "LoopedBFS", .ranks = 2, .stages_per_rank = -1, .micro_batches = 2}, "-1 stages a rank: expected 1 to"},
      {{.name = "LoopedBFS", .ranks = 1 << 20, .micro_batches = 2}, "1048576 ranks: expected 1 to 65536"},
  };
  for (const auto& [options, message] : cases) EXPECT_THAT(generator_error(options), HasSubstr(message));
  // And the nearest ones are right.
  for (const int m : {12, 15}) {
    EXPECT_EQ(make_schedule({.name = "interleaved", .ranks = 4, .micro_batches = m}).micro_batches, m);
  }
}

}  // namespace
}  // namespace phalanx::schedule
