// y = x W^T + b on any device and dtype, with the same values as at::linear(). The backward pass writes the weight's
// gradient directly into a buffer that is offered for it (tensor/weight_gradient.h), for example a data-parallel
// bucket.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// x [..., in], weight [out, in], bias [out] or undefined -> [..., out].
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

}  // namespace phalanx::kernels
