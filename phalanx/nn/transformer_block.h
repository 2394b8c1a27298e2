// One transformer layer: x = x + attention(attention_norm(x)); x = x + feed_forward(ffn_norm(x)). Or one half of it, if
// a pipeline is cut between the two.
//
// In some models these norms are behind attention and feed-forward net, or there are others behind them:
// attention_post_norm and ffn_post_norm (NormPlacement). The norms are RMSNorm, or LayerNorm with biases. The
// feed-forward net is gated (SwiGLU), GELU with biases, or a mixture of experts,
// which is registered as "moe" in place of "feed_forward".
#pragma once

#include <cstdint>
#include <memory>

#include "phalanx/nn/attention.h"
#include "phalanx/nn/latent_attention.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/nn/norm.h"
#include "phalanx/nn/positionwise.h"

namespace phalanx::nn {

enum class PositionwiseKind : std::uint8_t { swiglu, gelu, experts };

struct TransformerBlockOptions {
  AttentionOptions attention;
  LatentAttentionOptions latent_attention;  // in place of `attention`, if kv_rank is not 0
  std::int64_t ffn_hidden = 0;
  PositionwiseKind positionwise = PositionwiseKind::swiglu;
  GatedActivation activation = GatedActivation::silu;
  MixtureOptions mixture;  // of PositionwiseKind::experts, in place of ffn_hidden
  NormPlacement norms = NormPlacement::before;
  NormKind norm = NormKind::rms;
  double norm_eps = 1e-5;
  double residual_multiplier = 1.0;  // of what attention and feed-forward net add
  bool has_attention = true;         // with its norm
  bool has_feed_forward = true;
};

class TransformerBlock : public Module {
 public:
  explicit TransformerBlock(const TransformerBlockOptions& options, TensorOptionsOfModule tensor = {});

  /// x: [batch, seq, dim]. `documents` of its rows; null: each row is one document.
  at::Tensor forward(at::Tensor x, const RotaryTables& rope,
                     const std::shared_ptr<const DocumentBoundaries>& documents = nullptr);
  at::Tensor forward(at::Tensor x, const RotaryTables& rope, KvCache& cache, std::int64_t layer);

  // Null if this block is only the other half.
  std::shared_ptr<SelfAttention> attention;
  std::shared_ptr<Positionwise> feed_forward;
  std::shared_ptr<Norm> attention_norm, ffn_norm;
  std::shared_ptr<Norm> attention_post_norm, ffn_post_norm;  // null unless there are norms on both sides

 private:
  template <class Attend>
  at::Tensor layers(at::Tensor x, const Attend& attend);
  template <class Attend>
  at::Tensor layers_before_norms(at::Tensor x, const Attend& attend);

  /// Times residual_multiplier.
  at::Tensor scaled(const at::Tensor& delta) const {
    return residual_multiplier_ == 1.0 ? delta : delta * residual_multiplier_;
  }

  NormPlacement norms_;
  double residual_multiplier_;
};

}  // namespace phalanx::nn
