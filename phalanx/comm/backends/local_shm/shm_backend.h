// The shm backend, torch-free. See shm_collectives.h for how data move, control_block.h for why that is safe, shm_segment.h for
// the memory and p2p_channels.h for point-to-point messages.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/liveness/process_probe.h"
#include "phalanx/store/store.h"

namespace phalanx {

/// timeout: for all ranks to come; heartbeat: how long a stopped one is waited for (0: by the operation's clock alone).
std::shared_ptr<Backend> make_shm_backend(Store& store, int rank, int size, const std::string& name,
                                          std::chrono::milliseconds timeout,
                                          std::chrono::milliseconds heartbeat = kDefaultHeartbeat);

/// Several groups at once, each of some of the ranks behind `exchange`, all of which call this: members are those of
/// this rank's group, in order, and so error texts call them; `rank` is its place there. Without members: takes part in
/// the exchanges (three) and gets nullptr.
std::shared_ptr<Backend> make_shm_part(const std::vector<int>& members, int rank,
                                       const std::function<std::vector<std::string>(const std::string&)>& exchange,
                                       std::chrono::milliseconds heartbeat = kDefaultHeartbeat);

}  // namespace phalanx
