// Checks that the transfers that are posted (posting.h) all complete. It runs the ranks' programs on a model of a
// backend, and names the cycle in which ranks wait for each other forever.
//
// The model is as strict as a backend may be. A rank runs its program step by step. Posting takes no time. A pass waits
// for the group that brings its input. The first receive of a stage's inputs waits until the send is posted, because
// the shape is sent with it. A group starts when the groups before it have ended (`in_order`), all its transfers at
// once. A receive ends when its send has started, a send when its receive has (`rendezvous`), the group when its last
// transfer has. Passes take no time: whether ranks wait forever does not depend on durations.
//
//   nccl         {.rendezvous = true, .in_order = true}. Its sends may be buffered; the model does not rely on it. A
//                device may run the groups of several communicators one after the other, in launch order: one_at_a_time
//   shm, gloo    {.rendezvous = true, .in_order = false}
#pragma once

#include <vector>

#include "phalanx/schedule/posting.h"
#include "phalanx/schedule/schedule.h"
#include "phalanx/schedule/validate.h"

namespace phalanx::schedule {

struct BackendModel {
  bool rendezvous = true;      // a send waits for its receive; else it is buffered
  bool in_order = true;        // groups of a communicator run one after the other, and messages match in that order
  bool one_at_a_time = false;  // the groups of all communicators of a rank run one after the other too
};

/// Returns an empty list if every rank finishes its program.
/// REQUIRES: the schedule is valid (validate.h) and post() made `programs` from it.
std::vector<Fault> check_deadlock(const Schedule& schedule, const std::vector<Program>& programs,
                                  const BackendModel& backend_model = {});

}  // namespace phalanx::schedule
