#include "phalanx/nn/transformer_block.h"

#include <ATen/TensorOperators.h>

namespace phalanx::nn {

TransformerBlock::TransformerBlock(const TransformerBlockOptions& options, TensorOptionsOfModule tensor)
    : Module("TransformerBlock") {
  const std::int64_t dim = options.attention.dim;
  if (options.has_attention) {
    attention = register_module("attention", std::make_shared<Attention>(options.attention, tensor));
  }
  if (options.has_feed_forward) {
    feed_forward = register_module("feed_forward", std::make_shared<FeedForward>(dim, options.ffn_hidden, tensor));
  }
  if (attention)
    attention_norm = register_module("attention_norm", std::make_shared<RMSNorm>(dim, options.norm_eps, tensor));
  if (feed_forward) ffn_norm = register_module("ffn_norm", std::make_shared<RMSNorm>(dim, options.norm_eps, tensor));
}

at::Tensor TransformerBlock::forward(at::Tensor x, const RotaryTables& rope) {
  if (attention) x = x + call(attention, call(attention_norm, x), rope);
  return feed_forward ? x + call(feed_forward, call(ffn_norm, x)) : x;
}

at::Tensor TransformerBlock::forward(at::Tensor x, const RotaryTables& rope, KvCache& cache, std::int64_t layer) {
  if (attention) x = x + call(attention, call(attention_norm, x), rope, cache, layer);
  return feed_forward ? x + call(feed_forward, call(ffn_norm, x)) : x;
}

}  // namespace phalanx::nn
