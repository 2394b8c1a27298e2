// Makes the world communicator for CUDA tensors from a world communicator for host memory.
//
//   auto host = make_shm_communicator(store, rank, world_size);
//   auto world = make_device_communicator(std::move(host), c10::Device("cuda:0"), {.path = DevicePath::automatic});
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "phalanx/comm/communicator.h"

namespace phalanx {

enum class DevicePath : std::uint8_t {
  automatic,  // nccl; if a rank cannot use it: staged, with a warning
  nccl,       // nccl.h
  staged      // staged_backend.h
};

struct DeviceCommunicatorOptions {
  DevicePath path = DevicePath::automatic;
  CommunicatorOptions communicator;
};

/// Collective. For a CPU device it returns the host communicator itself. Otherwise it takes the host communicator over:
/// nobody else may use that from then on, and the device becomes the calling thread's current one. Errors are those of
/// make_nccl_communicator() and make_staged_backend().
std::shared_ptr<Communicator> make_device_communicator(std::shared_ptr<Communicator> host, c10::Device device,
                                                       DeviceCommunicatorOptions options = {});

}  // namespace phalanx
