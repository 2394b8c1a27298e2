// When each action of a schedule runs, from what it waits for: the one walk behind simulate(), validate() and tables.
//
// A rank does its passes one after the other; each begins as soon as its inputs are there. Sends do not hold the sender
// up: what is sent arrives `transfer` later. Receives do not hold the receiver up either: the pass that needs the data
// does. In a compute schedule what the neighbouring stage made is sent at once. An overlap begins when all its parts
// can, and what it makes is there when it ends.
//
// The actions must be in range (validate() sees to it). A schedule that comes to a halt is no error here: the ranks
// then stop short of their ends.
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
  std::vector<std::vector<Span>> spans;  // as Schedule::actions; a transfer's from when it was asked for until
                                         // the data is there
  std::vector<std::size_t> ran;          // by rank: how many actions ran
  std::vector<std::optional<Action>> waiting_for;  // by rank: the missing action, where the rank stopped short
};

Dataflow walk(const Schedule& schedule, const Durations& durations);

/// The passes as a table: a row a step, a column a rank. Each pass takes one step and stands in the first after its
/// inputs' steps; cells of ranks that wait are empty.
std::string to_step_table(const Schedule& schedule);

}  // namespace phalanx::schedule
