// at::mm and at::addmm with an out_dtype, which libtorch has for CUDA alone: factors of 16 bits, products and sums in
// float32.
#pragma once

#include <memory>

namespace phalanx::sim_device {

/// While the result lives, CPU tensors have them too, by the kernels of the simulated devices. So a run on the CPU has
/// the same bits as one on a device.
/// REQUIRES: no other thread uses tensors while this is called, nor when the result is freed.
std::shared_ptr<void> register_out_dtype_on_cpu();

}  // namespace phalanx::sim_device
