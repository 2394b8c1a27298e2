// Rotates pairs (i, i + head_dim / 2) of the last dimension by the given angles, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// x [batch, heads, seq, head_dim], any strides; cos, sin [seq, head_dim / 2] or [batch, seq, head_dim / 2], in fp32.
/// Returns [batch, heads, seq, head_dim] in x's dtype.
at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// Both rotated by the same angles: on a GPU by one kernel, in fp32 with one rounding. k may have fewer heads.
struct RotatedPair {
  at::Tensor q, k;
};
RotatedPair apply_rotary(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin);

/// The same by ATen ops: any dtype and device, and the reference of the tests.
at::Tensor apply_rotary_reference(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace phalanx::kernels
