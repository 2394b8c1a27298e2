// y = x W^T + b, any device and dtype. The same numbers as at::linear(); the backward pass puts the weight's gradient
// straight into a buffer that is offered for it (tensor/weight_gradient.h), for example a data-parallel bucket.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// x [..., in], weight [out, in], bias [out] or undefined -> [..., out].
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

}  // namespace phalanx::kernels
