// The gate of a SwiGLU feed-forward, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// silu(gate) * up, elementwise; silu(g) = g / (1 + exp(-g)).
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace phalanx::kernels
