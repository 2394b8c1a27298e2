// The local backend: ranks are threads of one process and read each other's buffers in place.
//
// A collective has two rounds. In the first each rank publishes its signature and the address of its description. In
// the second it says that it no longer needs its peers' buffers. Between the two:
//   reductions    each rank reduces its slice, reading all ranks' buffers in rank order, and writes the result to every
//                 rank that receives it. No other rank accesses that slice, so results may replace inputs in place.
//   the others    each rank copies its result out of its peers' buffers.
#pragma once

#include <memory>
#include <vector>

#include "phalanx/comm/backends/local_shm/control_block.h"
#include "phalanx/comm/backends/local_shm/p2p_channels.h"

namespace phalanx {

/// One backend per rank. Only the rank's thread uses it (or the progress thread for it).
std::vector<std::shared_ptr<Backend>> make_local_backends(int size);

/// The rank of this backend will do nothing more, in this group and in all split from it. A rank that waits for it soon
/// gets an error.
/// REQUIRES: make_local_backends() made the backend.
void mark_local_rank_gone(Backend& backend) noexcept;

}  // namespace phalanx
