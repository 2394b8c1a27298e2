// y = x W^T + b on any device and dtype, with the same values as at::linear(). The backward pass writes the weight's
// gradient directly into a buffer that is offered for it (tensor/weight_gradient.h), for example a data-parallel
// bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace phalanx::kernels {

/// x [..., in], weight [out, in], bias [out] or undefined -> [..., out].
/// A frozen weight may have 16 bits under x in fp32 (frozen_weight.h).
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// linear(x, weight) of several weights [out_i, in]. Of three weights (queries, keys, values) on a GPU it is one
/// product, if they are adjacent (fused_linear.h), or under autocast. Its parts are the results: their rows are not
/// contiguous.
std::vector<at::Tensor> linears(const at::Tensor& x, const std::vector<at::Tensor>& weights);

}  // namespace phalanx::kernels
