// Root-mean-square normalisation over the last dimension, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// x / sqrt(mean(x^2, -1) + eps) * weight; x [..., dim], weight [dim]. Computed in fp32, returned in x's dtype,
/// or weight's if that is wider. On a GPU under autocast it is returned in autocast's dtype: the products that
/// take it would cast it to that.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// What a residual layer begins with: h = x + delta (h = x if delta is undefined), and y = rms_norm(h). On a GPU each
/// pass is one kernel; h's gradient is added in the backward pass's.
struct ResidualNorm {
  at::Tensor h, y;
};
ResidualNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps);

/// h alone, as a residual layer ends: x + delta. On a GPU one kernel, also where their dtypes differ.
at::Tensor add_delta(const at::Tensor& x, const at::Tensor& delta);

/// The same by ATen ops: any dtype and device, and the reference of the tests.
at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps);

}  // namespace phalanx::kernels
