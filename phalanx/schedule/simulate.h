// Simulates how long a schedule takes and how much of that time the ranks wait, from the times of its passes.
//
// Each rank runs its passes one after the other, each as soon as its inputs are there. A transfer arrives `transfer`
// after it was sent and blocks neither end (dataflow.h). An overlap takes as long as its parts together. Schedules
// with and without transfers take the same time. Times are in any unit.
//
// With p ranks, m micro-batches, v stages a rank, times of a stage's pass F, B = I + W, and no time for transfers, a
// step takes the work of a rank, v m (F + B), plus the time that it waits (tests check all of these):
//
//   GPipe, 1F1B                     (p - 1) (F + B)           so the bubble is (p - 1) / (m + p - 1)
//   LoopedBFS, Interleaved1F1B      (p - 1) (F + B)           (p - 1) / (v m + p - 1), if p divides m
//   InterleavedZeroBubble           (p - 1) (F + I - W)       if p divides m, m >= 2 p and W <= F, I. With v = 1 the
//                                                             ZB-H1 of "Zero Bubble Pipeline Parallelism" (Qi et al.
//                                                             2023, arXiv 2401.10241, table 1)
//   ZBVZeroBubble, F = I = W        (p - 1) F                 if m >= 2 p; all of it before a rank's first or after its
//                                                             last pass, so span_bubble is 0 (section 6 there)
//   DualPipeV, F = I                (p - 1) (F + 2 B - 3 W)   (p - 1) ((F&B) + B - 3 W) in the table of DeepSeek's
//                                                             DualPipe, an overlap F&B taking F + B here
//
// Live activations are counted in micro-batches of one stage. So a schedule of v stages a rank has v times as many,
// each a v-th of the size.
//
//   const Simulation result = simulate(schedule, {.common = {.forward = 1.0, .backward = 2.0}});
//   fmt::print("{:.1f} % bubble", 100 * result.bubble);
#pragma once

#include <string>
#include <vector>

#include "phalanx/schedule/dataflow.h"
#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

struct PassTimes {
  double forward = 1.0;
  double backward = 2.0;
  double backward_input = 1.0;
  double backward_weight = 1.0;

  /// The time of a pass of one of these four kinds.
  double& of(ActionKind kind);
  double of(ActionKind kind) const { return PassTimes(*this).of(kind); }
};

struct Times {
  PassTimes common;
  std::vector<PassTimes> by_stage;  // if stages differ; empty: all as `common`
  double transfer = 0.0;            // from one rank to another
};

struct Simulation {
  std::vector<std::vector<Span>> spans;  // of Schedule::actions; a transfer's span is from its request to its arrival
  double makespan = 0.0;                 // from the start of the first pass to the end of the last
  std::vector<double> busy;              // by rank: time in passes
  std::vector<double> bubble_of_rank;    // the share of the makespan that a rank waits
  double bubble = 0.0;                   // their mean
  // The zero-bubble papers' measure, for steps that follow each other without a common end: the rank with the longest
  // time from its first pass to its last waits this share of that time.
  double span_bubble = 0.0;
  std::vector<int> peak_live_activations;  // by rank
};

/// Throws ConfigError if the schedule is not valid (validate.h), or if times are negative or not one for each stage.
Simulation simulate(const Schedule& schedule, const Times& times = {});

/// The same for any spans, one for each action, such as measured ones.
Simulation summarise(const Schedule& schedule, std::vector<std::vector<Span>> spans);

/// By rank: the most activations alive at once, from F to the end of B or W. In an overlap the new activations are
/// alive before the ended ones are freed. All 0 in a schedule without backward passes.
std::vector<int> peak_live_activations(const Schedule& schedule);

}  // namespace phalanx::schedule
