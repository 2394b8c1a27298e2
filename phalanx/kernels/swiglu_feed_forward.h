// A whole SwiGLU feed-forward as one differentiable function.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// w2 (silu(w1 x) * w3 x); x [..., dim], w1 and w3 [hidden, dim], w2 [dim, hidden].
///
/// On the CPU in fp32 it goes through the rows in chunks that stay in the cache, keeps w1 x and w3 x for the backward
/// pass and recomputes the product, so that no [rows, hidden] temporary exists in either pass.
at::Tensor swiglu_feed_forward(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& w3);

/// Into memory that is there, outside autograd: y = silu(gate) * up; and of dy the gradients, with y once more.
/// Contiguous tensors of one shape; fused on the CPU in fp32, ATen ops elsewhere.
void swiglu_into(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& y);
void swiglu_backward_into(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& dy, const at::Tensor& dgate,
                          const at::Tensor& dup, const at::Tensor& y);

/// silu(gate) * up by ATen ops: what lies between the matrices; any dtype and device.
at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up);

}  // namespace phalanx::kernels
