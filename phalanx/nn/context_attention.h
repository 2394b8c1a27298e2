// ContextAttention: how layers attend if each rank has some positions of every sequence (context parallelism).
//
// Attention is the only layer in which positions meet. The code that cuts the sequences (parallel/context) gives the
// attention layers a ContextAttention, and they attend through it. Layers without one attend as usual.
//
//   y = attention.attend(q, k, v, {.window = window, .documents = documents});   // this rank's positions in and out
//
// Contract: collective, in the forward pass and in the backward pass. q is [batch, heads, positions, head_dim], k and v
// are [batch, kv_heads, positions, head_dim], rotated already. Differentiable once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::nn {

struct AttendOptions {
  std::int64_t window = 0;                                        // 0: none
  std::shared_ptr<const DocumentBoundaries> documents = nullptr;  // of whole, padded rows; null: each row is one
  at::Tensor sinks = {};  // [heads], of kernels/attention_sinks.h; undefined: none
};

class ContextAttention {
 public:
  virtual ~ContextAttention() = default;
  virtual at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttendOptions& options) const = 0;
};

}  // namespace phalanx::nn
