// What a pipeline's ranks hand to their communicator, and when: one pure function, whose result the runtime
// (parallel/pipeline) runs step by step and check_deadlock() (deadlock_check.h) walks through. So what is checked is what is
// posted.
//
// A step posts a group of transfers, which start together and hold up nobody, or runs one action. A pass waits for the
// group that brings what it takes in; so does everything behind it.
//
//   - Where messages have tags (shm, gloo, mpi) each transfer is its own group, and receives may be posted ahead of
//     their turn.
//   - Where they have none (nccl) the groups of a communicator run one after the other: a receive posted ahead holds up
//     the sends behind it until it has been met. There nothing is posted ahead of its turn, and sends and the receive
//     behind them are one group, so that ranks that send to each other first do not wait for each other.
//   - The receiver learns the shape of a stage's output beside the first of them; so the first receive of a stage's
//     inputs is never posted ahead, stands alone, and holds its rank up until the send has been posted. Gradients have
//     the shape of the output: none is received ahead of the first output that the stage sends.
//
//   for (const Step& step : post(schedule, posting_for(traits.has_tags))[rank]) ...
#pragma once

#include <vector>

#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

struct PostingOptions {
  int receives_ahead = 0;  // so many receives are posted ahead of their turn
  bool groups = false;     // sends and the receive behind them are one group
  int communicators = 1;   // 2: outputs go over the first, gradients over the second; a group is of one of them
};

/// What the runtime does where nothing else is said.
PostingOptions posting_for(bool has_tags);

struct Step {
  Action action;                  // F, B, I, W, UNSHARD, RESHARD or REDUCE_GRAD; where transfers is empty
  std::vector<Action> transfers;  // what is posted, as one group
  int communicator = 0;           // of the group
  bool waits_for_shape = false;   // the group is the first receive of a stage's inputs

  bool operator==(const Step&) const = default;
};

using Program = std::vector<Step>;

/// By rank. The schedule has its transfers (transfers.h) and is right (validate.h); overlaps are taken apart.
std::vector<Program> post(const Schedule& schedule, const PostingOptions& options = {});

/// The forward passes and what they send, UNSHARD and RESHARD: for evaluation.
Schedule forward_only(const Schedule& schedule);

}  // namespace phalanx::schedule
