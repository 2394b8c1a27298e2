// Timeline: a pipeline's step as it ran, compared with a simulation of the same schedule with the times of its passes.
//
//   std::vector<std::vector<ExecutedPass>> ranks = gather();         // of every rank, on one clock
//   const Timeline timeline = make_timeline(schedule, ranks);
//   fmt::print("{}", to_text(timeline));                             // times, ranks, makespans
//   write_file("step.svg", to_svg(timeline));                        // executed above simulated, to one scale
//   EXPECT_LE(timeline.ratio(), 1.1);
//
// A stage's times are the means over its micro-batches. The transfer time is measured at passes whose rank was idle and
// waited for the transfer: the median delay from the end of the producing pass to the start of the waiting pass. So it
// includes the hand-over and the wake-up. There are three makespans: what ran; the simulation from the stages' times
// (`simulated`), with transfers and without; and `replayed`, in which every pass takes as long as it did. If `replayed`
// is as long as what ran, then passes of uneven length explain the difference to `simulated`; the rest is due to the
// runtime.
#pragma once

#include <string>
#include <vector>

#include "phalanx/schedule/schedule.h"
#include "phalanx/schedule/simulate.h"

namespace phalanx::schedule {

/// A pass as it ran, in seconds; it does not include waiting for its input.
struct ExecutedPass {
  Action action;  // F, B, I or W
  double start = 0.0, end = 0.0;
};

struct Timeline {
  Schedule schedule;                      // passes and overlaps only
  Times times;                            // measured, in seconds, by stage; 0 if a stage has no pass of the kind
  int waited_transfers = 0;               // number of transfers that times.transfer was measured at
  Simulation executed;                    // its spans begin with 0
  Simulation simulated;                   // from `times`
  double without_transfers = 0.0;         // makespan of the simulation with transfers that take no time
  double replayed = 0.0;                  // makespan of the simulation with each pass's own time
  double earliest_use = 0.0;              // the shortest delay from making an output to using it; below 0 if the ranks'
                                          // clocks differ
  double ratio() const;                   // of the makespans: executed / simulated
  double rate_without_transfers() const;  // executed rate / rate of the simulation from the stages' times alone
};

/// `ranks`: passes in the order in which each rank ran them. Throws ConfigError if they are not the schedule's passes.
Timeline make_timeline(const Schedule& schedule, const std::vector<std::vector<ExecutedPass>>& ranks);

/// The schedule of what ran. It is one of generators.h if the passes are the same, which shows what overlapped. Else it
/// has these passes under the name "executed". Throws ConfigError if there are no passes or the schedule is not valid
/// (validate.h).
Schedule schedule_of(const std::vector<std::vector<ExecutedPass>>& ranks);

/// Tables for people, in milliseconds.
std::string to_text(const Timeline& timeline);
/// Like to_svg() of draw.h, the executed step above the simulated one, in milliseconds.
std::string to_svg(const Timeline& timeline);

}  // namespace phalanx::schedule
