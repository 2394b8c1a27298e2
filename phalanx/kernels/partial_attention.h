// Causal attention of some queries to some keys, and its gradients, on every device: for a ring of ranks, and for what
// ATen's own operators do not cover.
//
// The output is normalised over the keys that a query sees here, and comes with the log-sum-exp of their scores. So
// the outputs for several sets of keys can be merged. The backward pass gets the merged output and log-sum-exp with one
// set of keys, and returns the part of the gradients that goes through these.
//
//   const AttentionKernel kernel = attention_kernel_for(q, k, v);
//   AttentionPart sum = attend(kernel, q, k, v, queries);                    // queries.keys: where k and v are
//   sum.y = sum.y.to(sum_type(q.scalar_type()));
//   merge_into(sum, attend(kernel, q, later_k, later_v, later_queries));
//   const AttentionPart whole{sum.y.to(q.scalar_type()), sum.log_sums};
//   const AttentionGradients g = attention_gradients(kernel, dy, q, k, v, whole, queries);
//
// Contract: knows no autograd. q is [batch, heads, queries, head_dim], k and v are [batch, kv_heads, keys, head_dim],
// of one type, with any strides; heads is a multiple of kv_heads. The host waits for nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "phalanx/kernels/attention_queries.h"

namespace phalanx::kernels {

enum class AttentionKernel : std::uint8_t {
  cpu,          // our own, fp32
  cpu_16_bits,  // ATen's flash attention for the CPU
  flash,        // of devices, 16 bits
  efficient,    // of devices, fp32: memory-efficient attention
  operators     // matrix products, for blocks of queries: every type and device
};
/// Of devices, for tensors of this type; operators where it has no fused kernel.
AttentionKernel device_kernel_for(at::ScalarType type, std::int64_t head_dim);
/// By device, type and head_dim. On devices windows in fp32 are attended by operators.
AttentionKernel attention_kernel_for(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

struct AttentionPart {
  at::Tensor y;         // as q; of q's type or wider
  at::Tensor log_sums;  // fp32 (fp64 for fp64) [batch, heads, queries]; -infinity where no key is seen, and y is 0
};
AttentionPart attend(AttentionKernel kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionQueries& queries);

/// Makes `sum` the attention to the keys of both, in place.
/// REQUIRES: sum.y is fp32 or fp64; each query sees a key in one of them.
void merge_into(const AttentionPart& sum, const AttentionPart& part);

struct AttentionGradients {
  at::Tensor dq, dk, dv;
};
/// `whole`: over all keys that the queries see, y in q's type. `into`: where the gradients go, if defined; then dq is
/// added to, and dk and dv are overwritten. REQUIRES: each query sees a key here, or into.dq is defined.
AttentionGradients attention_gradients(AttentionKernel kernel, const at::Tensor& dy, const at::Tensor& q,
                                       const at::Tensor& k, const at::Tensor& v, const AttentionPart& whole,
                                       const AttentionQueries& queries, const AttentionGradients& into = {});

/// The type in which outputs and gradients of several parts are summed.
inline at::ScalarType sum_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }
/// [batch, heads, seq, head_dim] with memory layout [batch, seq, heads, head_dim],
/// as the projections around it need it.
at::Tensor empty_heads_like(const at::Tensor& t, at::ScalarType type);

}  // namespace phalanx::kernels
