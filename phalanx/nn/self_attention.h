// SelfAttention: what the layers of a block need of causal self-attention, and what all forms of it have in common.
//
// A form of it makes queries, keys and values out of x (heads()), and a result of what was attended to (project()). The
// heads of all three have one size. Scores are divided by its square root, or by that of another number.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "phalanx/nn/context_attention.h"
#include "phalanx/nn/kv_cache.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/rotary.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::nn {

class SelfAttention : public Module {
 public:
  /// x [batch, seq, dim] -> [batch, seq, dim]; `rope` holds the tables of these seq positions. `documents` of x's rows;
  /// null: each row is one document.
  at::Tensor forward(const at::Tensor& x, const RotaryTables& rope,
                     const std::shared_ptr<const DocumentBoundaries>& documents = nullptr);
  /// Inference: x's tokens follow those of `cache`. `rope` holds the tables of their positions.
  /// REQUIRES: the caller has begun the cache's pass.
  at::Tensor forward(const at::Tensor& x, const RotaryTables& rope, KvCache& cache, std::int64_t layer);

  /// Key and value heads that a cache of this layer holds on this rank.
  virtual std::int64_t cached_heads() const = 0;

  /// From now on x holds this rank's positions of every sequence, and those of other ranks are attended to through it.
  /// REQUIRES: not used with a cache.
  void set_context_attention(std::shared_ptr<const ContextAttention> context) { context_ = std::move(context); }

  std::shared_ptr<Linear> wo;

 protected:
  /// `head_dim`: of q and k. `query_scalar`: scores are divided by its square root; 0: by that of head_dim. `window`: a
  /// position attends to itself and window - 1 before it; 0: to all before it.
  SelfAttention(const char* name, std::int64_t head_dim, double query_scalar, std::int64_t window)
      : Module(name), head_dim_(head_dim), query_scalar_(query_scalar), window_(window) {}

  struct Heads {
    at::Tensor q;     // [batch, heads, seq, head_dim], rotated
    at::Tensor k, v;  // [batch, kv_heads, seq, head_dim]; k is rotated
  };
  /// Of x [batch, seq, dim].
  virtual Heads heads(const at::Tensor& x, const RotaryTables& rope) = 0;
  /// The result of attention, as q -> [batch, seq, dim].
  virtual at::Tensor project(const at::Tensor& y) = 0;
  /// For each of this rank's query heads a score for a key whose value is zero (kernels/attention_sinks.h); undefined:
  /// there are none.
  virtual at::Tensor used_sinks() const { return {}; }
  /// The kernels divide by sqrt(head_dim): queries for which that is the right number.
  at::Tensor scaled(const at::Tensor& q) const;

 private:
  std::int64_t head_dim_;
  double query_scalar_;
  std::int64_t window_;
  std::shared_ptr<const ContextAttention> context_;
};

}  // namespace phalanx::nn
