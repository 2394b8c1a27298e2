// Causal self-attention over whole sequences, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace phalanx::kernels {

/// softmax(q k^T / sqrt(head_dim) + causal mask) v. q is [batch, heads, seq, head_dim]. k and v are [batch, kv_heads,
/// seq, head_dim]. Any strides. Returns q's shape.
/// REQUIRES: heads is a multiple of kv_heads (consecutive query heads share one).
///
/// On the CPU in fp32, blocks of queries are multiplied only with the keys that they may see, which saves nearly half
/// of the products. The backward pass recomputes the probabilities from the saved log-sum-exp. Otherwise it is
/// at::scaled_dot_product_attention, under autocast in autocast's dtype. On the CPU, a checkpointed layer may save its
/// outputs (saved_activations.h).
///
/// `window` > 0: a query sees its own key and window - 1 before it. If that is less than the sequence, blocks of
/// queries are multiplied with the keys of their windows by at::scaled_dot_product_attention: seq (window + block)
/// products and a mask of one block.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window = 0);

/// The same by at::scaled_dot_product_attention.
at::Tensor causal_attention_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

}  // namespace phalanx::kernels
