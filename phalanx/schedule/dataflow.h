// Computes when each action of a schedule runs, from what it waits for. simulate(), validate() and the tables all use
// this one walk.
//
// A rank runs its passes one after the other; each begins as soon as its inputs are there. Sends do not block the
// sender: what is sent arrives `transfer` later. Receives do not block the receiver either: the pass that needs the
// data waits. In a compute schedule the output of the neighbouring stage is sent at once. An overlap begins when all
// its parts can, and its outputs are there when it ends.
//
// REQUIRES: the actions are in range (validate() checks this). A schedule that deadlocks is no error here: the ranks
// then stop before their ends.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

struct Span {
  double start = 0.0;
  double end = 0.0;
};

struct Durations {
  std::function<double(const Action& action)> action;  // of a pass or an overlap
  double transfer = 0.0;
};

struct Dataflow {
  std::vector<std::vector<Span>> spans;  // as Schedule::actions; a transfer's span is from its request until the data
                                         // is there
  std::vector<std::size_t> ran;          // by rank: how many actions ran
  std::vector<std::optional<Action>> waiting_for;  // by rank: the missing action, if the rank stopped early
};

Dataflow walk(const Schedule& schedule, const Durations& durations);

/// The passes as a table: a row per step, a column per rank. Each pass takes one step and is in the first step after
/// those of its inputs. Cells of ranks that wait are empty.
std::string to_step_table(const Schedule& schedule);

}  // namespace phalanx::schedule
