// Whether the fused CPU kernels support these tensors: fp32 on the CPU, no autocast. All others use ATen ops, which
// support every dtype and device.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

template <class... Tensors>
bool fusible(const Tensors&... tensors) {
  return ((tensors.device().is_cpu() && tensors.scalar_type() == at::kFloat) && ...) &&
         !at::autocast::is_autocast_enabled(at::kCPU);
}

}  // namespace phalanx::kernels
