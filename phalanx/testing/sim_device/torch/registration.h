// What sim_backend() registers with libtorch, a part each. Call each once.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>

#include "phalanx/testing/sim_device/torch/sim_backend.h"

namespace phalanx::sim_device {

void register_allocators(SimBackend& backend);
void register_device_guard(SimBackend& backend);  // current device and stream, events
void register_hooks(SimBackend& backend);         // pinned memory, default generators, storage of another size
void register_operators(SimBackend& backend);
void register_autocast();                        // the rules of CUDA
void register_gpu_kernels(SimBackend& backend);  // Phalanx's own kernels

c10::Allocator& device_allocator();  // on the current device and stream
c10::Allocator& pinned_allocator();

/// index -1: the current device's.
const at::Generator& default_generator(int device);
at::Generator make_sim_generator(int device);
/// A CPU generator for one operator's random numbers. The device's generator moves on.
at::Generator next_generator(const at::Generator& device_generator);

}  // namespace phalanx::sim_device
