// One pre-norm transformer layer: x = x + attention(attention_norm(x)); x = x + feed_forward(ffn_norm(x)).
// Or one half of it, where a pipeline is cut between the two.
#pragma once

#include <cstdint>
#include <memory>

#include "phalanx/nn/attention.h"
#include "phalanx/nn/feed_forward.h"
#include "phalanx/nn/rms_norm.h"

namespace phalanx::nn {

struct TransformerBlockOptions {
  AttentionOptions attention;
  std::int64_t ffn_hidden = 0;
  double norm_eps = 1e-5;
  bool has_attention = true;  // with its norm
  bool has_feed_forward = true;
};

class TransformerBlock : public Module {
 public:
  explicit TransformerBlock(const TransformerBlockOptions& options, TensorOptionsOfModule tensor = {});

  at::Tensor forward(at::Tensor x, const RotaryTables& rope);  // [batch, seq, dim]
  at::Tensor forward(at::Tensor x, const RotaryTables& rope, KvCache& cache, std::int64_t layer);

  // Null in the other half.
  std::shared_ptr<Attention> attention;
  std::shared_ptr<FeedForward> feed_forward;
  std::shared_ptr<RMSNorm> attention_norm, ffn_norm;
};

}  // namespace phalanx::nn
