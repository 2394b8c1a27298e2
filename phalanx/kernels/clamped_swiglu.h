// The step between the matrix products of GPT-OSS's experts: SwiGLU with limits, and one added to what is gated.
//
//   g = min(gate, limit),  u = min(max(up, -limit), limit)
//   y = (u + 1) g sigmoid(1.702 g)
//
//   const at::Tensor y = clamped_swiglu(w1 x, w3 x, /*limit=*/7.0);
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// The gain of the sigmoid, with which g sigmoid(gain g) is close to GELU.
inline constexpr double kSigmoidGain = 1.702;

/// Any type and device. Saves `gate` and `up` for the backward pass and nothing else. Differentiable once.
at::Tensor clamped_swiglu(const at::Tensor& gate, const at::Tensor& up, double limit);

}  // namespace phalanx::kernels
