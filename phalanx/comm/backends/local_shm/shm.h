// The shm communicator: ranks are processes of one machine that exchange data through shared memory.
//
// Collective: every rank calls it with the same store, world size and options.name. Throws a CommError if shared memory
// cannot be had or a rank runs elsewhere (another machine or PID namespace), on every rank. Nothing is left behind in
// the file system, however the ranks end.
//
//   auto comm = make_shm_communicator(store, rank, world_size, {.name = "node"});
#pragma once

#include <memory>

#include "phalanx/comm/communicator.h"
#include "phalanx/store/store.h"

namespace phalanx {

std::shared_ptr<Communicator> make_shm_communicator(Store& store, int rank, int world_size,
                                                    CommunicatorOptions options = {});

}  // namespace phalanx
