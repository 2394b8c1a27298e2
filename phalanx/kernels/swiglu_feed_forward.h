// A whole SwiGLU feed-forward as one differentiable function.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// w2 (silu(w1 x) * w3 x); x [..., dim], w1 and w3 [hidden, dim], w2 [dim, hidden].
///
/// On the CPU in fp32 it goes through the rows in chunks that stay in the cache, keeps w1 x and w3 x for the backward
/// pass and recomputes the product, so that no [rows, hidden] temporary exists in either pass.
at::Tensor swiglu_feed_forward(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& w3);

/// silu(gate) * up by ATen ops: what lies between the matrices; any dtype and device.
at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up);

}  // namespace phalanx::kernels
