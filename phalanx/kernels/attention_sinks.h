// Attention sinks: one more score for each query head, of a key whose value is zero. It takes a share of the softmax.
//
//   y = softmax([q k^T / sqrt(head_dim), sink]) [v; 0]
//
// So what was attended to without it is merged with the sink as with another set of keys (partial_attention.h). The
// gradients of queries, keys and values then follow from the merged output and log-sum-exp, as for any set of keys.
//
//   AttentionPart whole = with_sinks(attend(kernel, q, k, v, queries), sinks);
//   const at::Tensor dsinks = sink_gradients(dy, whole, sinks);
//
// Contract: with_sinks() and sink_gradients() know no autograd. `sinks`: [heads], those of the heads of `part`, in any
// floating-point type. Undefined: there are none.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "phalanx/kernels/partial_attention.h"

namespace phalanx::kernels {

/// For functions of autograd, whose inputs are defined.
inline std::optional<at::Tensor> if_defined(const at::Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

/// Throws Error, which begins with `what`, if there are sinks, and they are not of the heads of q [batch, heads, ...].
void require_sinks_of(const std::string& what, const at::Tensor& q, const at::Tensor& sinks);

/// May change `part`'s memory. y keeps its type. Without sinks it returns `part`.
AttentionPart with_sinks(const AttentionPart& part, const at::Tensor& sinks);

/// Of sinks' type; undefined without sinks. `whole`: what with_sinks() returned, y in any type.
at::Tensor sink_gradients(const at::Tensor& dy, const AttentionPart& whole, const at::Tensor& sinks);

/// at::scaled_dot_product_attention with the sinks as one more key. `mask`: bool [queries, keys] or [batch or 1, 1,
/// queries, keys], true where a query sees a key. Differentiable. It copies keys and values.
/// REQUIRES: sinks are defined.
at::Tensor masked_attention_with_sinks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       const at::Tensor& mask, const at::Tensor& sinks);

}  // namespace phalanx::kernels
