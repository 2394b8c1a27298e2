// The shm communicator: ranks are processes of one node that exchange data through shared memory.
//
//   auto comm = make_shm_communicator(store, rank, world_size, {.name = "node"});
#pragma once

#include <memory>

#include "phalanx/comm/communicator.h"
#include "phalanx/store/store.h"

namespace phalanx {

/// Nothing is left behind in the file system, however the ranks end.
/// REQUIRES: every rank calls it, with the same store, world size and options.name.
/// Throws CommError on every rank if shared memory cannot be had or a rank runs elsewhere (on another node or in
/// another PID namespace).
std::shared_ptr<Communicator> make_shm_communicator(Store& store, int rank, int world_size,
                                                    CommunicatorOptions options = {});

}  // namespace phalanx
