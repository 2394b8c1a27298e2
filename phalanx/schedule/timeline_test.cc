#include "phalanx/schedule/timeline.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/transfers.h"

namespace phalanx::schedule {
namespace {

using Executed = std::vector<std::vector<ExecutedPass>>;

// The passes of ranks that would run exactly as simulated, from a moment of the clock on. The parts of an overlap share
// its time.
Executed as_simulated(const Schedule& schedule, const Times& times, double begin = 1000.0) {
  const Simulation simulation = simulate(schedule, times);
  Executed ranks;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    ranks.emplace_back();
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const Action& action = schedule.actions[rank][i];
      const Span& span = simulation.spans[rank][i];
      if (!is_pass(action.kind) && action.kind != ActionKind::overlap) continue;
      double at = begin + span.start;
      for_each_sub_action(action, [&](const Action& part) {
        const PassTimes& of =
            times.by_stage.empty() ? times.common : times.by_stage[static_cast<std::size_t>(part.stage)];
        const double takes = part.kind == ActionKind::forward          ? of.forward
                             : part.kind == ActionKind::backward       ? of.backward
                             : part.kind == ActionKind::backward_input ? of.backward_input
                                                                       : of.backward_weight;
        ranks.back().push_back({part, at, at + takes});
        at += takes;
      });
    }
  }
  return ranks;
}

TEST(Timeline, WhatRanAsSimulatedIsWhatWasSimulated) {
  for (const std::string& name : schedule_names()) {
    SCOPED_TRACE(name);
    const Schedule schedule = make_schedule({.name = name, .ranks = 4, .micro_batches = 8});
    Times times{.by_stage = {}, .transfer = 0.002};
    for (int stage = 0; stage < schedule.stages(); ++stage) {
      times.by_stage.push_back({0.010 + 0.001 * stage, 0.021, 0.012, 0.009});
    }
    const Timeline timeline = make_timeline(schedule, as_simulated(schedule, times));
    const Simulation expected = simulate(schedule, times);
    EXPECT_NEAR(timeline.times.transfer, 0.002, 1e-9);
    EXPECT_GT(timeline.waited_transfers, 0);
    EXPECT_NEAR(timeline.executed.makespan, expected.makespan, 1e-9);
    EXPECT_NEAR(timeline.simulated.makespan, expected.makespan, 1e-9);
    EXPECT_NEAR(timeline.replayed, expected.makespan, 1e-9);
    EXPECT_NEAR(timeline.executed.bubble, expected.bubble, 1e-9);
    EXPECT_NEAR(timeline.ratio(), 1.0, 1e-9);
    EXPECT_NEAR(timeline.times.by_stage[3].forward, 0.013, 1e-9);
    EXPECT_EQ(timeline.executed.peak_live_activations, peak_live_activations(schedule));
    EXPECT_NEAR(timeline.earliest_use, 0.002, 1e-9);
    times.transfer = 0.0;
    EXPECT_NEAR(timeline.without_transfers, simulate(schedule, times).makespan, 1e-9);
  }
}

// 1F1B of two ranks and two micro-batches, by hand: a step of 9 units. Rank 1's 1F1 takes 2 units more than 1F0; their
// mean is 2, and everything after it is two units later.
TEST(Timeline, UnevenPassesAreToldFromWaiting) {
  const Schedule schedule = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 2});
  const auto pass = [](int stage, ActionKind kind, int micro_batch, double start, double end) {
    return ExecutedPass{make_action(stage, kind, micro_batch), start, end};
  };
  using enum ActionKind;
  const Executed ranks = {
      {pass(0, forward, 0, 0, 1), pass(0, forward, 1, 1, 2), pass(0, backward, 0, 4, 6), pass(0, backward, 1, 9, 11)},
      {pass(1, forward, 0, 1, 2), pass(1, backward, 0, 2, 4), pass(1, forward, 1, 4, 7), pass(1, backward, 1, 7, 9)}};
  const Timeline timeline = make_timeline(schedule, ranks);
  EXPECT_DOUBLE_EQ(timeline.executed.makespan, 11);
  EXPECT_DOUBLE_EQ(timeline.times.by_stage[1].forward, 2);
  EXPECT_DOUBLE_EQ(timeline.times.transfer, 0);
  EXPECT_DOUBLE_EQ(timeline.simulated.makespan, 11);
  EXPECT_DOUBLE_EQ(timeline.replayed, 11);
  EXPECT_THAT(timeline.executed.busy, ElementsAre(6, 8));
  EXPECT_DOUBLE_EQ(timeline.executed.bubble_of_rank[0], 5.0 / 11);

  Executed late = ranks;  // half a unit without a cause, in the middle of a rank's work
  for (ExecutedPass* one : {&late[1][2], &late[1][3], &late[0][3]}) {
    one->start += 0.5;
    one->end += 0.5;
  }
  const Timeline waited = make_timeline(schedule, late);
  EXPECT_DOUBLE_EQ(waited.executed.makespan, 11.5);
  EXPECT_DOUBLE_EQ(waited.simulated.makespan, 11);
  EXPECT_DOUBLE_EQ(waited.ratio(), 11.5 / 11);
  EXPECT_DOUBLE_EQ(waited.rate_without_transfers(), 11 / 11.5);
}

TEST(Timeline, TheScheduleIsKnownByItsPasses) {
  for (const std::string& name : schedule_names()) {
    const Schedule schedule = make_schedule({.name = name, .ranks = 4, .micro_batches = 8});
    EXPECT_EQ(schedule_of(as_simulated(schedule, {})), schedule) << name;
    // With its transfers placed the passes are the same.
    EXPECT_EQ(make_timeline(add_transfers(schedule), as_simulated(schedule, {})).schedule, schedule) << name;
  }
  Schedule own = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 3});
  for (auto& row : own.actions) std::swap(row[4], row[5]);
  EXPECT_EQ(schedule_of(as_simulated(own, {})).name, "executed");
  EXPECT_EQ(schedule_of(as_simulated(own, {})).actions, own.actions);
}

TEST(Timeline, WhatIsNoRunOfTheScheduleIsRefused) {
  const Schedule schedule = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 2});
  const Executed ranks = as_simulated(schedule, {});
  const Schedule other = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 2});
  EXPECT_EQ(error_text<ConfigError>([&] { make_timeline(other, ranks); }),
            "what ran is not schedule GPipe: rank 1, pass 1: expected 1F1, found 1B0");
  EXPECT_EQ(error_text<ConfigError>([&] { make_timeline(schedule, {ranks[0]}); }),
            "schedule 1F1B is for 2 ranks, and the passes are of 1");
  Executed halved = ranks;
  halved[1].pop_back();
  EXPECT_EQ(error_text<ConfigError>([&] { make_timeline(schedule, halved); }),
            "what ran is not schedule 1F1B: rank 1, pass 3: expected 1B1, found nothing more");
  EXPECT_THAT(error_text<ConfigError>([&] { schedule_of(halved); }), HasSubstr("rank 1, 1B1: it is missing"));
  EXPECT_EQ(error_text<ConfigError>([] { schedule_of({{}, {}}); }), "nothing has run: no rank has a pass");
}

TEST(Timeline, TextAndPicture) {
  const Schedule schedule = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 2});
  const Times times{.common = {.forward = 0.010, .backward = 0.020, .backward_input = 0, .backward_weight = 0},
                    .by_stage = {},
                    .transfer = 0.001};
  Executed ranks = as_simulated(schedule, times);
  EXPECT_EQ(to_text(make_timeline(schedule, ranks)),
            "1F1B: 2 ranks, 2 stages, 2 micro-batches; times in milliseconds\n"
            "\n"
            "stage  rank          F          B          I          W\n"
            "    0     0     10.000     20.000          -          -\n"
            "    1     1     10.000     20.000          -          -\n"
            "a transfer 1.000 (median of 3 that a rank waited for)\n"
            "\n"
            "rank        busy     waits  simulated waits  live at most\n"
            "   0      60.000    34.8 %           34.8 %             2\n"
            "   1      60.000    34.8 %           34.8 %             1\n"
            "\n"
            "makespan                                                                executed / this\n"
            "executed                                                       92.000   1.000\n"
            "simulated from the stages' times                               92.000   1.000\n"
            "  with transfers that take no time                             90.000   1.022\n"
            "  with each pass as long as it was                             92.000   1.000\n");
  const std::string svg = to_svg(make_timeline(schedule, ranks));
  EXPECT_THAT(svg, AllOf(HasSubstr("1F1B, executed: 34.8 % bubble"), HasSubstr("1F1B, simulated: 34.8 % bubble"),
                         HasSubstr("<title>1B1: 51 to 71</title>"), HasSubstr("makespan 92 ms"), HasSubstr("time, ms"),
                         HasSubstr("</g>\n</svg>\n")));
  for (ExecutedPass& pass : ranks[1]) {  // a rank whose clock is 5 ms behind
    pass.start -= 0.005;
    pass.end -= 0.005;
  }
  EXPECT_THAT(to_text(make_timeline(schedule, ranks)), HasSubstr("was used 4.000 ms before it was made"));
}

}  // namespace
}  // namespace phalanx::schedule
