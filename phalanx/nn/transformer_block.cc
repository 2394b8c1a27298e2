#include "phalanx/nn/transformer_block.h"

#include <ATen/TensorOperators.h>

#include "phalanx/nn/feed_forward.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/nn/mlp.h"

namespace phalanx::nn {
namespace {

std::shared_ptr<Positionwise> make_positionwise(const TransformerBlockOptions& options, TensorOptionsOfModule tensor) {
  const std::int64_t dim = options.attention.dim, hidden = options.ffn_hidden;
  switch (options.positionwise) {
    case PositionwiseKind::gelu:
      return std::make_shared<Mlp>(dim, hidden, tensor);
    case PositionwiseKind::experts:
      return std::make_shared<MixtureOfExperts>(
          MixtureOptions{
              .dim = dim, .hidden = hidden, .experts = options.experts, .experts_per_token = options.experts_per_token},
          tensor);
    default:
      return std::make_shared<FeedForward>(dim, hidden, tensor);
  }
}

}  // namespace

TransformerBlock::TransformerBlock(const TransformerBlockOptions& options, TensorOptionsOfModule tensor)
    : Module("TransformerBlock") {
  const auto norm = [&](const char* name) {
    return register_module(name, make_norm(options.norm, options.attention.dim, options.norm_eps, tensor));
  };
  if (options.has_attention) {
    attention = register_module("attention", std::make_shared<Attention>(options.attention, tensor));
  }
  if (options.has_feed_forward) {
    const char* name = options.positionwise == PositionwiseKind::experts ? "moe" : "feed_forward";
    feed_forward = register_module(name, make_positionwise(options, tensor));
  }
  if (attention) attention_norm = norm("attention_norm");
  if (feed_forward) ffn_norm = norm("ffn_norm");
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
