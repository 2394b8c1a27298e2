// The streams of a simulated device as comm/ sees those of any device, so that communicators move its memory.
//
//   Communicator comm(make_staged_backend(host, 0, make_sim_streams(0)), {});
#pragma once

#include <memory>

#include "phalanx/comm/device/device_streams.h"

namespace phalanx::sim_device {

/// is_done() of its events throws CommError once the device has failed.
std::shared_ptr<DeviceStreams> make_sim_streams(int device);

}  // namespace phalanx::sim_device
