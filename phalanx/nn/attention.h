// Causal self-attention with grouped queries: n_heads query heads share n_kv_heads key and value heads.
//
//   q, k, v = wq x, wk x, wv x            split into heads, q and k rotated by the rotary tables
//   y = wo softmax(q k^T / sqrt(head_dim) + causal mask) v
//
// Options for the various models: a bias on q, k and v, and one on the result; an RMS norm of each head of q and k, or
// of all heads together, before the rotation; a rotation of the first elements of each head alone, or none at all; a
// window, so that a position attends to itself and window - 1 before it; scores divided by another number than
// sqrt(head_dim); a sink for each query head, which is one more score in its softmax (kernels/attention_sinks.h).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "phalanx/kernels/rotary.h"
#include "phalanx/models/config/layer_forms.h"
#include "phalanx/nn/rms_norm.h"
#include "phalanx/nn/self_attention.h"

namespace phalanx::nn {

struct AttentionOptions {
  std::int64_t dim = 0;
  std::int64_t n_heads = 0;
  std::int64_t n_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t window = 0;  // 0: all previous positions
  bool qkv_bias = false;
  bool output_bias = false;
  bool sinks = false;
  QkNorm qk_norm = QkNorm::none;
  bool norms_add_one = false;  // as RMSNorm
  double norm_eps = 1e-5;
  bool rotary = true;           // false: `rope` is ignored
  std::int64_t rotary_dim = 0;  // elements of a head that are rotated; 0: all
  double query_scalar = 0.0;    // scores are divided by its square root; 0: by that of head_dim
};

class Attention : public SelfAttention {
 public:
  explicit Attention(const AttentionOptions& options, TensorOptionsOfModule tensor = {});

  /// On a device the weights of queries, keys and values become adjacent: they are one product.
  std::vector<std::vector<at::Tensor>> one_products() const override;
  std::int64_t cached_heads() const override { return wk->weight.size(0) / options_.head_dim; }

  /// From now on x and the result are this rank's rows, and the projections exchange rows through it.
  /// REQUIRES: not used with a cache.
  void set_collective_matmul(std::shared_ptr<const CollectiveMatmul> exchange) {
    collective_matmul_ = std::move(exchange);
  }

  const AttentionOptions& options() const noexcept { return options_; }

  std::shared_ptr<Linear> wq, wk, wv;
  std::shared_ptr<RMSNorm> q_norm, k_norm;  // null without qk_norm
  at::Tensor sinks;                         // [n_heads], of this rank's heads; undefined without sinks

 private:
  Heads heads(const at::Tensor& x, const RotaryTables& rope) override;
  at::Tensor used_sinks() const override { return sinks.defined() ? used("sinks", sinks) : sinks; }
  std::vector<at::Tensor> projections(const at::Tensor& x);  // q, k, v: [batch, seq, heads * head_dim]
  kernels::RotatedPair rotated(const at::Tensor& q, const at::Tensor& k, const RotaryTables& rope) const;
  at::Tensor project(const at::Tensor& y) override;

  AttentionOptions options_;
  std::shared_ptr<const CollectiveMatmul> collective_matmul_;
};

}  // namespace phalanx::nn
