// Decides what a pipeline's ranks post to their communicator, and when. It is one pure function. The runtime
// (parallel/pipeline) runs its result step by step, and check_deadlock() (deadlock_check.h) walks through the same
// result. So what is checked is what is posted.
//
// A step either posts a group of transfers, which start together and do not block the rank, or runs one action. A pass
// waits for the group that brings its input; so does every step after it.
//
//   - If messages have tags (shm, gloo, mpi), each transfer is its own group, and receives may be posted ahead of their
//     turn.
//   - If messages have no tags (nccl), the groups of a communicator run one after the other. A receive posted ahead
//     would block the sends after it until its send has come. So nothing is posted ahead of its turn, and sends and the
//     receive after them are one group, so that ranks that send to each other first do not wait for each other.
//   - The receiver learns the shape of a stage's output together with the first of them. So the first receive of a
//     stage's inputs is never posted ahead, is a group alone, and blocks its rank until the send has been posted.
//     Gradients have the shape of the output: none is received ahead of the first output that the stage sends.
//
//   for (const Step& step : post(schedule, posting_for(traits.has_tags))[rank]) run(step);
#pragma once

#include <vector>

#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

struct PostingOptions {
  int receives_ahead = 0;  // how many receives are posted ahead of their turn
  bool groups = false;     // sends and the receive after them are one group
  int communicators = 1;   // 2: outputs use the first, gradients the second; a group is on one of them
};

/// The runtime's default.
PostingOptions posting_for(bool has_tags);

struct Step {
  Action action;                  // F, B, I, W, UNSHARD, RESHARD or REDUCE_GRAD; used if `transfers` is empty
  std::vector<Action> transfers;  // what is posted, as one group
  int communicator = 0;           // of the group
  bool waits_for_shape = false;   // the group is the first receive of a stage's inputs

  bool operator==(const Step&) const = default;
};

using Program = std::vector<Step>;

/// By rank. Overlaps are split into their parts.
/// REQUIRES: the schedule has its transfers (transfers.h) and is valid (validate.h).
std::vector<Program> post(const Schedule& schedule, const PostingOptions& options = {});

/// Only the forward passes and their transfers, UNSHARD and RESHARD: for evaluation.
Schedule forward_only(const Schedule& schedule);

}  // namespace phalanx::schedule
