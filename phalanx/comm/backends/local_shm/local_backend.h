// The local backend: ranks are threads of one process and read each other's buffers in place.
//
// A collective is two rounds. In the first each rank publishes its signature and the address of its description; in the
// second it says that it needs its peers' buffers no longer. Between the two:
//   reductions    each rank reduces its slice, reading all ranks' buffers in rank order, and writes the result to every
//                 rank that gets it. Nobody else reads or writes that slice, so results may replace inputs in place.
//   the others    each rank copies what it is to get out of its peers' buffers.
#pragma once

#include <memory>
#include <vector>

#include "phalanx/comm/backends/local_shm/control_block.h"
#include "phalanx/comm/backends/local_shm/p2p_channels.h"

namespace phalanx {

/// One backend per rank; each is used by the thread that plays the rank (or the progress thread for it).
std::vector<std::shared_ptr<Backend>> make_local_backends(int size);

/// The rank of a backend that make_local_backends() made will do nothing more, in this group and all split from it:
/// whoever waits for it gets an error soon.
void mark_local_rank_gone(Backend& backend) noexcept;

}  // namespace phalanx
