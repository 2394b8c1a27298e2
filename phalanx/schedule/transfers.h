// Converts a compute schedule to one that a runtime can follow step by step. It places SEND and RECV and, if asked for,
// UNSHARD, RESHARD and REDUCE_GRAD. The rules are those of torch.distributed.pipelining.
//
// A SEND follows the pass that makes what is sent. The RECV is placed in the receiver's list where the receiver is at
// the time of the send, if all passes are equally long. So it is posted ahead of the pass that needs it. Thus there is
// one order of all actions of all ranks in which each SEND is followed by its RECV, and every rank's list is a part of
// it. Therefore no rank can wait forever: not with asynchronous transfers, not with a communicator that completes its
// operations in the order of their issue, and not if a send waits for its receive (deadlock_check.h). Between two
// ranks, sends and receives are in the same order on both.
//
//   Schedule schedule = add_transfers(make_schedule({.name = "1F1B", .ranks = 4, .micro_batches = 8}));
#pragma once

#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

struct TransferOptions {
  // UNSHARD and RESHARD: before each action the next so many different stages that the rank will need are unsharded.
  // The number includes the stage in use, so 2 unshards one ahead (torch has 3). All others are resharded. 0: neither
  // is placed.
  int unshard_stages = 0;
  bool reduce_gradients = false;  // REDUCE_GRAD after a stage's last B or W
};

/// Throws ConfigError if the schedule is not valid (validate.h), or already has transfers or what the options ask for.
Schedule add_transfers(const Schedule& schedule, const TransferOptions& options = {});

}  // namespace phalanx::schedule
