// The simulated accelerators as a device of libtorch, "sim:0" to "sim:7" (PrivateUse1): tensors, autograd, autocast,
// streams, events, pinned memory and generators, with every operator of ATen.
//
// - An operator runs as its CPU kernel, on a stream's thread. So its results are the CPU's, bit for bit. The host goes
//   on at once, unless the shape of the output depends on data.
// - Phalanx's own GPU kernels (kernels/gpu/) run by their host build. Each is one launch, with a name such as
//   "rms_norm". So the library takes the paths here that it takes on a GPU.
// - What counts as a wait of the host: item(), a copy to the host or from pageable memory, a copy that is not
//   non_blocking, operators with shapes that depend on data, synchronize().
// - One launch is one operator, not one kernel of CUDA's.
// - Races are found by the bytes of a tensor's contiguous pieces. A tensor of more than 64 pieces counts as all bytes
//   from its first element to its last: two such tensors that lie between each other look like a race.
//
//   SimBackend& sim = sim_backend();
//   const auto x = at::ones({4}, at::TensorOptions().device(sim.device(0)));
//   (x + x).sum().item<float>();                             // 8; sim.runtime.host_waits().total() is 1
//   EXPECT_THAT(sim.runtime.races(), IsEmpty());
#pragma once

#include <c10/core/Device.h>

#include "phalanx/testing/sim_device/caching_allocator.h"
#include "phalanx/testing/sim_device/runtime.h"

namespace phalanx::sim_device {

struct SimBackend {
  SimBackend();

  Runtime runtime;
  CachingAllocator memory{runtime};

  static c10::Device device(int index) { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}; }
};

/// Registers the device when first called. Libtorch has room for one such device in a process, and never lets go of it.
/// Any thread may call.
SimBackend& sim_backend();

}  // namespace phalanx::sim_device
