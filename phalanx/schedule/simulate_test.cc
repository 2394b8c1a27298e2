#include "phalanx/schedule/simulate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/transfers.h"

namespace phalanx::schedule {
namespace {

struct Size {
  int ranks, stages_per_rank, micro_batches;
};

// Sizes for which the number of ranks divides that of micro-batches, at least twice.
std::vector<Size> round_sizes(const std::string& name) {
  std::vector<Size> sizes;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const int rounds : {2, 3, 5}) {
      for (const int stages : {1, 2, 3}) {
        const bool one = name == "GPipe" || name == "1F1B", two = name == "ZBVZeroBubble" || name == "DualPipeV";
        if ((one && stages != 1) || (two && stages != 2)) continue;
        sizes.push_back({ranks, stages, rounds * ranks});
      }
    }
  }
  return sizes;
}

PassTimes split_times(double forward, double input, double weight) {
  return {.forward = forward, .backward = input + weight, .backward_input = input, .backward_weight = weight};
}

// The waiting time of each rank, from the simulator; with transfers placed it is the same.
double waiting(const std::string& name, const Size& size, const PassTimes& times) {
  const Schedule schedule = make_schedule({.name = name,
                                           .ranks = size.ranks,
                                           .stages_per_rank = size.stages_per_rank,
                                           .micro_batches = size.micro_batches});
  const Simulation result = simulate(schedule, {.common = times});
  const double work = size.stages_per_rank * size.micro_batches * (times.forward + times.backward);
  EXPECT_THAT(result.busy, Each(DoubleNear(work, 1e-9)));
  EXPECT_THAT(result.bubble_of_rank, Each(DoubleNear(1.0 - work / result.makespan, 1e-12)));
  EXPECT_NEAR(result.bubble, 1.0 - work / result.makespan, 1e-12);
  EXPECT_DOUBLE_EQ(simulate(add_transfers(schedule), {.common = times}).makespan, result.makespan);
  return result.makespan - work;
}

TEST(Simulate, BubbleOfGPipeAnd1F1B) {
  for (const char* name : {"GPipe", "1F1B"}) {
    for (const Size& size : round_sizes(name)) {
      for (const PassTimes& times : {split_times(1, 1, 1), split_times(1, 1.5, 0.25), split_times(2, 0.5, 0.5)}) {
        const double p = size.ranks, m = size.micro_batches;
        EXPECT_NEAR(waiting(name, size, times), (p - 1) * (times.forward + times.backward), 1e-9);
        const Simulation result = simulate(
            make_schedule({.name = name, .ranks = size.ranks, .micro_batches = size.micro_batches}), {.common = times});
        EXPECT_NEAR(result.bubble, (p - 1) / (m + p - 1), 1e-12) << name << " " << p << " " << m;
      }
    }
  }
}

TEST(Simulate, BubbleOfInterleavedSchedules) {
  for (const char* name : {"Interleaved1F1B", "LoopedBFS"}) {
    for (const Size& size : round_sizes(name)) {
      for (const PassTimes& times : {split_times(1, 1, 1), split_times(1, 1.5, 0.25), split_times(2, 0.5, 0.5)}) {
        const double p = size.ranks, v = size.stages_per_rank, m = size.micro_batches;
        const double waits = waiting(name, size, times), work = v * m * (times.forward + times.backward);
        EXPECT_NEAR(waits / (work + waits), (p - 1) / (v * m + p - 1), 1e-12) << name << " " << p << " " << v;
      }
    }
  }
}

TEST(Simulate, BubbleOfZB1PIsThePapers) {
  for (const Size& size : round_sizes("InterleavedZeroBubble")) {
    for (const PassTimes& times : {split_times(1, 1, 1), split_times(1, 1.5, 1), split_times(2, 2, 1),
                                   split_times(1, 1, 0.5), split_times(1.5, 1, 0.75)}) {
      const double expected = (size.ranks - 1) * (times.forward + times.backward_input - times.backward_weight);
      EXPECT_NEAR(waiting("ZB1P", size, times), expected, 1e-9) << size.ranks << " " << size.stages_per_rank;
    }
  }
}

TEST(Simulate, BubbleOfZBVIsZeroButForTheStaggeredStart) {
  for (const Size& size : round_sizes("ZBVZeroBubble")) {
    EXPECT_NEAR(waiting("ZBV", size, split_times(1, 1, 1)), size.ranks - 1, 1e-9);
    const Schedule schedule = make_schedule({.name = "ZBV", .ranks = size.ranks, .micro_batches = size.micro_batches});
    const Simulation result = simulate(schedule, {.common = split_times(1, 1, 1)});
    EXPECT_NEAR(result.span_bubble, 0.0, 1e-12);
    for (std::size_t rank = 0; rank < result.spans.size(); ++rank) {
      EXPECT_DOUBLE_EQ(result.spans[rank].front().start, static_cast<double>(rank));  // then it never waits
      EXPECT_DOUBLE_EQ(result.spans[rank].back().end, static_cast<double>(rank) + result.busy[rank]);
    }
    if (size.ranks == 1) continue;
    // Not where the times differ.
    EXPECT_GT(simulate(schedule, {.common = split_times(1, 1.5, 0.5)}).span_bubble, 0.001);
  }
}

TEST(Simulate, BubbleOfDualPipeVIsDeepSeeks) {
  for (const Size& size : round_sizes("DualPipeV")) {
    for (const PassTimes& times : {split_times(1, 1, 1), split_times(1, 1, 0.5), split_times(2, 2, 1)}) {
      const double both = times.forward + times.backward;  // an overlap, F&B
      EXPECT_NEAR(waiting("DualPipeV", size, times),
                  (size.ranks - 1) * (both + times.backward - 3 * times.backward_weight), 1e-9)
          << size.ranks;
    }
  }
}

TEST(Simulate, SpansByHand) {
  const Schedule schedule = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 2});
  const Simulation result = simulate(schedule, {.transfer = 0.5});
  const auto starts = [&](std::size_t rank) {
    std::vector<double> values;
    for (const Span& span : result.spans[rank]) values.push_back(span.start);
    return values;
  };
  EXPECT_THAT(starts(0), ElementsAre(0, 1, 6, 8));
  EXPECT_THAT(starts(1), ElementsAre(1.5, 2.5, 3.5, 5.5));
  EXPECT_EQ(result.makespan, 10);
  EXPECT_THAT(result.busy, ElementsAre(6, 6));
  EXPECT_THAT(result.bubble_of_rank, ElementsAre(0.4, 0.4));
  EXPECT_NEAR(result.span_bubble, 0.4, 1e-12);

  // The same with transfers: a send is on its way for 0.5, a receive until what it waits for is there.
  const Schedule sending = add_transfers(schedule);
  const Simulation sent = simulate(sending, {.transfer = 0.5});
  EXPECT_EQ(sent.makespan, 10);
  ASSERT_EQ(to_text(sending.actions[0][1]), "0SEND_F0");
  EXPECT_EQ(sent.spans[0][1].start, 1);
  EXPECT_EQ(sent.spans[0][1].end, 1.5);
  ASSERT_EQ(to_text(sending.actions[1][0]), "1RECV_F0");
  EXPECT_EQ(sent.spans[1][0].start, 0);
  EXPECT_EQ(sent.spans[1][0].end, 1.5);

  // A slow last stage delays all ranks; its time in `common` does not count.
  const PassTimes slow = {.forward = 3.0, .backward = 4.0};
  const Simulation uneven = simulate(schedule, {.common = {.forward = 99.0}, .by_stage = {{}, slow}});
  EXPECT_EQ(uneven.makespan, 1 + 2 * 3 + 2 * 4 + 2);
  EXPECT_THAT(uneven.busy, ElementsAre(6, 14));
  EXPECT_NEAR(uneven.bubble, (11.0 / 17 + 3.0 / 17) / 2, 1e-12);
}

TEST(Simulate, WhatAnOverlapMakesIsThereWhenItEnds) {
  const Schedule schedule =
      parse_csv("0F0,(0F1;3B0)OVERLAP_F_B,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n", {.name = "none"});
  EXPECT_THROW(simulate(schedule), ConfigError);  // 3B0 before 3F0
  const Schedule right = parse_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,1B1,0B0,0B1\n");
  const Simulation result = simulate(right);
  EXPECT_EQ(result.spans[0][2].end - result.spans[0][2].start, 3);
  EXPECT_EQ(result.makespan, 12);
  EXPECT_THAT(result.peak_live_activations, ElementsAre(3));  // 0F0, 1F0 and 0F1
}

TEST(Simulate, WrongTimesAndSchedulesAreRefused) {
  const Schedule schedule = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 2});
  const auto message = [&](const Times& times) { return error_text<ConfigError>([&] { simulate(schedule, times); }); };
  EXPECT_EQ(message({.common = {.forward = -1}}), "the time of F is -1: expected 0 or more");
  EXPECT_THAT(message({.common = {.backward = std::nan("")}}), HasSubstr("the time of B is nan"));
  EXPECT_THAT(message({.by_stage = {{}, {.backward_weight = std::numeric_limits<double>::infinity()}}}),
              HasSubstr("the time of W is inf"));
  EXPECT_THAT(message({.transfer = -0.5}), HasSubstr("the time of a transfer is -0.5"));
  EXPECT_EQ(message({.by_stage = {{}}}), "times are given for 1 stages: expected one for each of the schedule's 2");
  EXPECT_EQ(message({.common = {.forward = 0, .backward = 0}}), "");
  EXPECT_EQ(simulate(schedule, {.common = {.forward = 0, .backward = 0}}).bubble, 0);
  EXPECT_THROW(simulate(parse_csv("0F0,0B0\n1F0\n")), ConfigError);
}

TEST(Simulate, LiveActivationsOfTheSchedules) {
  const auto peaks = [](const std::string& name, int ranks, int micro_batches, int stages = 0) {
    return peak_live_activations(
        make_schedule({.name = name, .ranks = ranks, .stages_per_rank = stages, .micro_batches = micro_batches}));
  };
  EXPECT_THAT(peaks("GPipe", 4, 8), ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(peaks("1F1B", 4, 8), ElementsAre(4, 3, 2, 1));  // min(m, p - stage)
  EXPECT_THAT(peaks("1F1B", 2, 2), ElementsAre(2, 1));
  EXPECT_THAT(peaks("LoopedBFS", 4, 8), ElementsAre(16, 16, 16, 16));
  // (v - 1) p + 2 (p - 1 - rank) warm-up passes, and one more.
  EXPECT_THAT(peaks("Interleaved1F1B", 4, 8), ElementsAre(11, 9, 7, 5));
  // ZB1P: every rank has the p of 1F1B's first rank, because backward_weight comes `rank` passes later.
  EXPECT_THAT(peaks("ZB1P", 4, 8, 1), ElementsAre(4, 4, 4, 4));
  // In a V, 2p halves of a rank's layers: as much as 1F1B's first rank has.
  EXPECT_THAT(peaks("ZBV", 4, 8), ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(peaks("GPipe", 1, 3), ElementsAre(3));
  EXPECT_THAT(peak_live_activations(parse_csv("0F0,0F1\n")), ElementsAre(0));  // evaluation keeps nothing
}

TEST(Simulate, StepTable) {
  EXPECT_EQ(to_step_table(make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 3})),
            "        Rank 0 Rank 1\n"
            "Step 0: 0F0\n"
            "Step 1: 0F1    1F0\n"
            "Step 2:        1B0\n"
            "Step 3: 0B0    1F1\n"
            "Step 4: 0F2    1B1\n"
            "Step 5: 0B1    1F2\n"
            "Step 6:        1B2\n"
            "Step 7: 0B2\n");
  // Actions that cannot run are not in it.
  EXPECT_EQ(to_step_table(parse_csv("0F0,0B0\n1B0,1F0\n")), "        Rank 0 Rank 1\nStep 0: 0F0\n");
  // Transfers take no step.
  const Schedule gpipe = make_schedule({.name = "GPipe", .ranks = 3, .micro_batches = 4});
  EXPECT_EQ(to_step_table(add_transfers(gpipe)), to_step_table(gpipe));
}

}  // namespace
}  // namespace phalanx::schedule
