// Causal self-attention over whole sequences, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "phalanx/layout/context_cut.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::kernels {

/// softmax(q k^T / sqrt(head_dim) + causal mask) v. q is [batch, heads, seq, head_dim]. k and v are [batch, kv_heads,
/// seq, head_dim]. Any strides. Returns q's shape.
/// REQUIRES: heads is a multiple of kv_heads (consecutive query heads share one).
///
/// On the CPU in fp32, blocks of queries are multiplied only with the keys that they may see, which saves nearly half
/// of the products. The backward pass recomputes the probabilities from the saved log-sum-exp. In other types, without
/// documents and windows it is at::scaled_dot_product_attention or its kernels, under autocast in autocast's dtype. A
/// checkpointed layer may save its outputs (saved_activations.h).
///
/// `window` > 0: a query sees its own key and window - 1 before it, and is multiplied with the keys of its block's
/// windows only: seq (window + block) products. No mask is kept. On a GPU it is flash attention in 16 bits, and matrix
/// products in fp32.
///
/// `documents`: a query sees only keys of its own document, as if each document were a sequence of its own. So the time
/// falls with the sum of the squared lengths. On a GPU one kernel of variable lengths takes all documents: flash
/// attention in 16 bits, memory-efficient attention in fp32. There a window in fp32 and other types take calls for each
/// document. Null: each row is one document. Throws Error if they do not have q's rows.
///
/// `sinks`: [heads], a score of each query head for a key whose value is zero (attention_sinks.h); undefined: none.
/// With them devices have the kernels of partial_attention.h: in 16 bits one for all documents, else calls for each of
/// them. Throws Error if they are not of q's heads.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window = 0,
                            const std::shared_ptr<const DocumentBoundaries>& documents = nullptr,
                            const at::Tensor& sinks = {});

/// The rows of causal_attention() for queries at some positions of the sequence only: q is [batch, heads, queries,
/// head_dim], k and v are those of all positions. `positions` are those of the queries, in increasing order.
/// `documents` are of the rows of k. On every device it keeps no mask: it has the kernels of partial_attention.h.
/// Throws Error if the shapes do not fit.
at::Tensor causal_attention_of_positions(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                         const std::vector<PositionRange>& positions, std::int64_t window = 0,
                                         const std::shared_ptr<const DocumentBoundaries>& documents = nullptr,
                                         const at::Tensor& sinks = {});

/// The same where each row has queries at positions of its own, as many in each, and documents.
/// Throws Error without them.
at::Tensor causal_attention_of_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const std::vector<std::vector<PositionRange>>& positions, std::int64_t window,
                                    const std::shared_ptr<const DocumentBoundaries>& documents,
                                    const at::Tensor& sinks = {});

/// The same by at::scaled_dot_product_attention with a mask of all pairs of positions.
at::Tensor causal_attention_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      std::int64_t window = 0, const DocumentBoundaries* documents = nullptr,
                                      const at::Tensor& sinks = {});

}  // namespace phalanx::kernels
