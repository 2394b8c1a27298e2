// Staged: CUDA tensors over a backend that moves host memory only (shm, gloo, local), through pinned host memory.
//
// For ranks that share a GPU, which NCCL refuses, and where NCCL is not to be had. Stream-ordered: a verb waits on the
// device for what the caller's stream has in hand, and the current stream waits for the result; but since the host
// moves the data in between, Work::wait() (and a synchronous verb) returns only when the host's part is done.
// CPU tensors, byte objects and barriers go straight to the backend below. Results, checks and errors are its own.
//
//   auto comm = Communicator(make_staged_backend(make_shm_backend(...), 0), options);
#pragma once

#include <memory>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx {

/// `host` must not be used by anybody else from then on. ConfigError if there is no such device.
std::shared_ptr<Backend> make_staged_backend(std::shared_ptr<Backend> host, int cuda_device);
/// The same over any streams; cuda_device -1: tensors are in host memory (tests).
std::shared_ptr<Backend> make_staged_backend(std::shared_ptr<Backend> host, int cuda_device,
                                             std::shared_ptr<DeviceStreams> streams);

}  // namespace phalanx
