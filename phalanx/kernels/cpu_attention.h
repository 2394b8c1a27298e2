// Causal attention in fp32 on the CPU: blocks of queries are multiplied only with the keys that they may see, and the
// backward pass recomputes the probabilities from the log-sum-exp.
//
//   if (has_cpu_attention()) cpu_attention(q, k, v, queries, y, log_sums);
//
// Contract: fp32 tensors [batch, heads, seq, head_dim] on the CPU with contiguous head_dim, any other strides. The
// results are written to tensors of the caller.
#pragma once

#include <ATen/core/Tensor.h>

#include "phalanx/kernels/attention_queries.h"

namespace phalanx::kernels {

/// Whether libtorch exports the matrix product that it needs.
bool has_cpu_attention();

/// y, and the log-sum-exp of each query's scores: float [batch, heads, queries], contiguous.
/// Queries that see no key are left as they are.
void cpu_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionQueries& queries,
                   const at::Tensor& y, const at::Tensor& log_sums);

/// Overwrites dk and dv. Adds to dq if `adds_to_dq`; otherwise overwrites the rows of queries that see keys. `y` and
/// `log_sums` may be those of more keys than these: then the gradients are the part that goes through these.
void cpu_attention_backward(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& y, const at::Tensor& log_sums, const AttentionQueries& queries,
                            const at::Tensor& dq, bool adds_to_dq, const at::Tensor& dk, const at::Tensor& dv);

}  // namespace phalanx::kernels
