// The streams of a simulated device as comm/ sees those of any device, so that communicators move its memory.
//
//   run_local_ranks(2, [](const std::shared_ptr<Communicator>& host) {
//     const std::shared_ptr<Communicator> world = on_sim_device(host);   // rank 0 has sim:0, rank 1 has sim:1
//     ...
//   });
#pragma once

#include <memory>

#include "phalanx/comm/communicator.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx::sim_device {

/// is_done() of its events throws CommError once the device has failed.
std::shared_ptr<DeviceStreams> make_sim_streams(int device);

/// The ranks of `host`, each with the simulated device of its rank's number, whose data goes through pinned memory
/// (comm/device/staged_backend.h). That device becomes the calling thread's current device.
std::shared_ptr<Communicator> on_sim_device(const std::shared_ptr<Communicator>& host);

}  // namespace phalanx::sim_device
