// Timeline: a pipeline's step as it ran, held against the same schedule simulated with the times that its passes took.
//
//   std::vector<std::vector<ExecutedPass>> ranks = ...;              // of every rank, on one clock
//   const Timeline timeline = make_timeline(schedule, ranks);
//   fmt::print("{}", to_text(timeline));                             // times, ranks, makespans
//   write_file("step.svg", to_svg(timeline));                        // executed above simulated, to one scale
//   EXPECT_LE(timeline.ratio(), 1.1);
//
// A stage's times are the means over its micro-batches. A transfer's is the median of how much later than the end of
// the pass that made it a pass began whose rank was idle and waited for it: so it holds the hand-over and the waking
// up. Three makespans are told apart: what ran; the simulation from the stages' times (`simulated`), with transfers and
// without; and `replayed`, in which every pass takes as long as it did. Where that is as long as what ran, passes of
// uneven length explain the difference to `simulated`; the rest is the runtime's.
#pragma once

#include <string>
#include <vector>

#include "phalanx/schedule/schedule.h"
#include "phalanx/schedule/simulate.h"

namespace phalanx::schedule {

/// A pass as it ran, in seconds; waiting for its input is not part of it.
struct ExecutedPass {
  Action action;  // F, B, I or W
  double start = 0.0, end = 0.0;
};

struct Timeline {
  Schedule schedule;                      // passes and overlaps only
  Times times;                            // measured, in seconds, by stage; 0 where a stage has no pass of the kind
  int waited_transfers = 0;               // from which times.transfer was taken
  Simulation executed;                    // its spans begin with 0
  Simulation simulated;                   // from `times`
  double without_transfers = 0.0;         // makespans of the simulation with transfers that take no time,
  double replayed = 0.0;                  // and with each pass's own time
  double earliest_use = 0.0;              // how much later than it was made something was used, at least; below 0 where
                                          // the ranks' clocks differ
  double ratio() const;                   // of the makespans: executed / simulated
  double rate_without_transfers() const;  // executed rate / that of the simulation from the stages' times alone
};

/// `ranks`: in the order in which each ran them. A ConfigError where they are not the schedule's passes.
Timeline make_timeline(const Schedule& schedule, const std::vector<std::vector<ExecutedPass>>& ranks);

/// The schedule of what ran: one of generators.h where the passes are the same, which tells what overlapped; else these
/// passes under the name "executed". Of no passes, or a schedule that is none (validate.h): a ConfigError.
Schedule schedule_of(const std::vector<std::vector<ExecutedPass>>& ranks);

/// Tables for people, in milliseconds.
std::string to_text(const Timeline& timeline);
/// As to_svg() of draw.h, the executed step above the simulated one, in milliseconds.
std::string to_svg(const Timeline& timeline);

}  // namespace phalanx::schedule
