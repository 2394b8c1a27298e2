// ContextAttention: how layers attend if each rank has some positions of every sequence (context parallelism).
//
// Attention is the only layer in which positions meet. The code that cuts the sequences (parallel/context) gives the
// attention layers a ContextAttention, and they attend through it. Layers without one attend as usual.
//
//   y = attention.attend(q, k, v, window, documents);   // this rank's positions in, this rank's positions out
//
// Contract: collective, in the forward pass and in the backward pass. q is [batch, heads, positions, head_dim], k and v
// are [batch, kv_heads, positions, head_dim], rotated already. `documents` are those of whole, padded rows; null: each
// row is one document. Differentiable once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::nn {

class ContextAttention {
 public:
  virtual ~ContextAttention() = default;
  virtual at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window,
                            const std::shared_ptr<const DocumentBoundaries>& documents) const = 0;
};

}  // namespace phalanx::nn
