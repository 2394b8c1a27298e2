// The streams of a simulated device as comm/ sees those of any device, so that communicators move its memory, and as
// kernels see them.
//
//   Communicator comm(make_staged_backend(host, 0, make_sim_streams(0)), {});
#pragma once

#include <memory>

#include "phalanx/comm/device/device_streams.h"
#include "phalanx/testing/sim_device/runtime.h"

namespace phalanx::sim_device {

/// is_done() of its events throws CommError once the device has failed.
std::shared_ptr<DeviceStreams> make_sim_streams(int device);

/// What c10::impl::DeviceGuardImplInterface::getStreamNativeHandle() returns: the device and the stream in one pointer.
/// nullptr is the default stream of device 0.
void* native_handle(StreamId stream);
StreamId stream_of_handle(void* handle);

}  // namespace phalanx::sim_device
