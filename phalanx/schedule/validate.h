// Checks that a schedule can be run and trains on every micro-batch. Every fault is named, with its rank, its position
// among the rank's actions (from 0), the action, and what is missing.
//
//   - stages, micro-batches and ranks are in range; each action is on its stage's rank
//   - each stage runs each micro-batch once: F, and B or both I and W (a schedule without any of B, I and W is for
//     evaluation: F only)
//   - the inputs of an action come before it: B and I after their F, W after its I, passes after those of the
//     neighbouring stage, SEND after what it sends, and each pass after the RECV of what comes from another rank
//   - in a schedule with transfers, everything that goes between ranks is sent once and received once, in the same
//     order
//   - if a schedule has UNSHARD or RESHARD: it has passes only of unsharded stages; if it has REDUCE_GRAD: once per
//     stage, after its last B or W
//   - it ends: no rank waits forever
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
  asynchronous,  // a send does not wait for its receive, and a receive does not block its rank
  rendezvous,    // as posted if messages have no tags (posting.h): a send waits for its receive, and a rank's
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

/// Returns an empty list if there is no fault. In the order of the ranks' actions; at most a thousand.
std::vector<Fault> validate(const Schedule& schedule, const ValidateOptions& options = {});

/// Throws ConfigError that names the first faults and counts the others.
void check(const Schedule& schedule, const ValidateOptions& options = {});

}  // namespace phalanx::schedule
