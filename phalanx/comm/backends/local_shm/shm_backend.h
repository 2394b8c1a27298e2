// The shm backend, torch-free. See round_operation.h for the protocol of collectives and why it is safe,
// collective_rounds.h for how data move, shm_segment.h for the memory and p2p_channels.h for point-to-point messages.
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

/// `timeout`: for all ranks to arrive. `heartbeat`: how long to wait for a stopped rank (0: as long as the operation's
/// timeout allows).
std::shared_ptr<Backend> make_shm_backend(Store& store, int rank, int size, const std::string& name,
                                          std::chrono::milliseconds timeout,
                                          std::chrono::milliseconds heartbeat = kDefaultHeartbeat);

/// Makes several groups at once, each from some of the ranks of `exchange`; all of those ranks call it. `members` are
/// the ranks of this rank's group, in order; error texts call them by these numbers. `rank` is this rank's index in
/// members. Without members this rank takes part in the exchanges (three) and gets nullptr.
std::shared_ptr<Backend> make_shm_part(const std::vector<int>& members, int rank,
                                       const std::function<std::vector<std::string>(const std::string&)>& exchange,
                                       std::chrono::milliseconds heartbeat = kDefaultHeartbeat);

}  // namespace phalanx
