// Is a schedule one that can be run, and does it train on every micro-batch? Everything that is wrong is named, with
// its rank, its position among the rank's actions (from 0), the action, and what is missing.
//
//   - stages, micro-batches and ranks are in range; each action is on its stage's rank
//   - each stage does each micro-batch once: F, and B or both I and W (a schedule without any of B, I and W is one for
//     evaluation: F only)
//   - what an action takes is there before it: B and I after their F, W after its I, passes after those of the
//     neighbouring stage, SEND after what it sends, and each pass after the RECV of what comes from another rank
//   - in a schedule with transfers each hand-over between ranks is sent once and received once, in the same order
//   - UNSHARD, RESHARD: passes of an unsharded stage only; REDUCE_GRAD: once a stage, after its last B or W; where a
//     schedule has any of them
//   - it comes to its end: no rank waits for ever
//   - live activations (micro-batches of a stage between F and the end of B or W) stay within a bound, if one is given
//
//   check(read_csv("mine.csv"));                                       // ConfigError with all that is wrong
//   for (const Fault& fault : validate(schedule, {.max_live_activations = {4, 3, 2, 1}})) warn(fault.text());
#pragma once

#include <string>
#include <vector>

#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

enum class Transport {
  asynchronous,  // a send does not wait for its receive, a receive does not hold up its rank
  rendezvous,    // as posted where messages have no tags (posting.h): a send waits for its receive, and a rank's
                 // transfers run one after the other (deadlock_check.h)
};

struct ValidateOptions {
  Transport transport = Transport::asynchronous;
  std::vector<int> max_live_activations;  // by rank; empty: any number
};

struct Fault {
  int rank = 0;
  int position = -1;   // -1: the action is missing
  std::string action;  // "2F0"
  std::string what;

  std::string text() const;  // "rank 1, position 4, 1B2: ..."
};

/// Empty if nothing is wrong. In the order of the ranks' actions; at most a thousand.
std::vector<Fault> validate(const Schedule& schedule, const ValidateOptions& options = {});

/// Throws a ConfigError that names the first faults and counts the rest.
void check(const Schedule& schedule, const ValidateOptions& options = {});

}  // namespace phalanx::schedule
