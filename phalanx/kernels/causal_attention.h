// Causal self-attention over whole sequences, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace phalanx::kernels {

/// softmax(q k^T / sqrt(head_dim) + causal mask) v; q [batch, heads, seq, head_dim], k and v [batch, kv_heads, seq,
/// head_dim] with heads a multiple of kv_heads (consecutive query heads share one); any strides. Returns q's shape.
///
/// On the CPU in fp32, blocks of queries meet only the keys they may see, which saves nearly half of the products; the
/// backward pass recomputes the probabilities from the kept log-sum-exp. Elsewhere it is
/// at::scaled_dot_product_attention, under autocast in its type. On the CPU its outputs may be kept (saved_activations.h).
///
/// `window` > 0: a query sees its own key and window - 1 before it. Where that is less than the sequence, blocks of
/// queries meet the keys of their windows by at::scaled_dot_product_attention: seq (window + block) products and a mask
/// of one block.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window = 0);

/// The same by at::scaled_dot_product_attention.
at::Tensor causal_attention_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

}  // namespace phalanx::kernels
