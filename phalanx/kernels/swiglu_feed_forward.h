// A whole SwiGLU feed-forward as one differentiable function.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// w2 (silu(w1 x) * w3 x). x is [..., dim], w1 and w3 [hidden, dim], w2 [dim, hidden].
///
/// On the CPU in fp32 it processes the rows in chunks that stay in the cache, saves w1 x and w3 x for the backward pass
/// and recomputes the product. So no [rows, hidden] temporary exists in either pass.
///
/// On a GPU the step between the products is one kernel, and the product is recomputed, too. w1 and w3 are one product
/// if they are adjacent (fused_linear.h), or under autocast. Under autocast the weights' gradients are summed in their
/// own type (weight_product.h).
at::Tensor swiglu_feed_forward(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& w3);

/// In preallocated memory, outside autograd. swiglu_into() computes y = silu(gate) * up. swiglu_backward_into()
/// computes the gradients from dy, and y once more. Fused on the CPU in fp32 and on a GPU, ATen ops otherwise.
/// REQUIRES: contiguous tensors of one shape.
void swiglu_into(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& y);
void swiglu_backward_into(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& dy, const at::Tensor& dgate,
                          const at::Tensor& dup, const at::Tensor& y);

/// silu(gate) * up: one kernel on a GPU, ATen ops otherwise. Differentiable.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// silu(gate) * up by ATen ops: the step between the matrix products. Any dtype and device.
at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up);

}  // namespace phalanx::kernels
