// Staged backend: CUDA tensors over a backend that moves host memory only (shm, gloo, local), through pinned host
// memory.
//
// For ranks that share a GPU, which NCCL refuses, and for nodes without NCCL. It is stream-ordered: the device waits
// for the work queued on the caller's stream before an operation, and the current stream waits for the result. But the
// host moves the data in between, so Work::wait() (and a synchronous verb) returns only when the host's part is done.
//
// CPU tensors, byte objects and barriers go directly to the backend below. Results, checks and errors are that
// backend's.
//
//   auto comm = Communicator(make_staged_backend(make_shm_backend(...), 0), options);
#pragma once

#include <memory>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx {

/// Throws ConfigError if there is no such device.
/// REQUIRES: from then on `host` has the same driver as the result.
std::shared_ptr<Backend> make_staged_backend(std::shared_ptr<Backend> host, int cuda_device);
/// The same over any streams. cuda_device -1: tensors are in host memory (tests).
std::shared_ptr<Backend> make_staged_backend(std::shared_ptr<Backend> host, int cuda_device,
                                             std::shared_ptr<DeviceStreams> streams);

}  // namespace phalanx
