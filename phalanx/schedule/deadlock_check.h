// Does what is posted (posting.h) come to its end? Runs the ranks' programs on a model of a backend, and names the
// cycle where ranks wait for each other for ever.
//
// The model, as strict as a backend may be. A rank runs its program step by step: posting takes no time, a pass waits
// for the group that brings its input, and the first receive of a stage's inputs for the send's posting (it is told the
// shape). A group starts when the ones before it have ended (`in_order`), all its transfers at once; a receive ends
// when its send has started, a send when its receive has (`rendezvous`), the group with the last of them. Passes take
// no time: whether ranks wait for ever does not depend on how long anything takes.
//
//   nccl         {.rendezvous = true, .in_order = true}; its sends may be buffered, which is not relied upon. A device
//                may run the groups of several communicators one after the other, as they were launched: one_at_a_time
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
  bool one_at_a_time = false;  // so do the groups of all communicators of a rank
};

/// Empty: every rank comes to its end. The schedule is right (validate.h) and `programs` was made of it by post().
std::vector<Fault> check_deadlock(const Schedule& schedule, const std::vector<Program>& programs,
                                  const BackendModel& backend_model = {});

}  // namespace phalanx::schedule
