// Causal self-attention whose keys and values come from a small vector of each token (multi-head latent attention,
// DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).
//
//   q = wq x                   or, with a rank for queries,   q = wq_b q_norm(wq_a x)
//   latent, k_rope = wkv_a x   of kv_rank and rope elements
//   k, v = wkv_b kv_norm(latent)
//
// Each head of q and k has nope elements that know no position, and rope elements behind them that are rotated. k_rope
// is the same for all heads. Pairs of neighbours are rotated, as in the released weights.
//
// The attention kernels take heads of one size. So values are filled up with zeros to the size of keys, and a cache
// holds keys and values of all heads, not the latent vectors.
#pragma once

#include <cstdint>
#include <memory>

#include "phalanx/nn/rms_norm.h"
#include "phalanx/nn/self_attention.h"

namespace phalanx::nn {

struct LatentAttentionOptions {
  std::int64_t dim = 0;
  std::int64_t n_heads = 0;
  std::int64_t q_rank = 0;  // 0: queries are made without a latent vector
  std::int64_t kv_rank = 0;
  std::int64_t head_dim = 0;   // of queries and keys: nope + rope
  std::int64_t rope = 0;       // an even number of elements, below head_dim
  std::int64_t value_dim = 0;  // at most head_dim
  double norm_eps = 1e-6;
  double query_scalar = 0.0;  // scores are divided by its square root; 0: by that of head_dim
};

class LatentAttention : public SelfAttention {
 public:
  explicit LatentAttention(const LatentAttentionOptions& options, TensorOptionsOfModule tensor = {});

  std::int64_t cached_heads() const override;

  std::shared_ptr<Linear> wq, wq_a, wq_b;  // wq, or the other two
  std::shared_ptr<Linear> wkv_a, wkv_b;
  std::shared_ptr<RMSNorm> q_norm, kv_norm;  // q_norm: null without q_rank

 private:
  Heads heads(const at::Tensor& x, const RotaryTables& rope) override;
  at::Tensor project(const at::Tensor& y) override;

  LatentAttentionOptions options_;
};

}  // namespace phalanx::nn
