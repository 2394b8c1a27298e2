#include "phalanx/nn/transformer_block.h"

#include <ATen/TensorOperators.h>

#include <utility>

#include "phalanx/nn/feed_forward.h"
#include "phalanx/nn/mlp.h"
#include "phalanx/nn/rms_norm.h"

namespace phalanx::nn {
namespace {

std::shared_ptr<Positionwise> make_positionwise(const TransformerBlockOptions& options, TensorOptionsOfModule tensor) {
  const std::int64_t dim = options.attention.dim, hidden = options.ffn_hidden;
  switch (options.positionwise) {
    case PositionwiseKind::gelu:
      return std::make_shared<Mlp>(dim, hidden, tensor);
    case PositionwiseKind::experts:
      return std::make_shared<MixtureOfExperts>(options.mixture, tensor);
    default:
      return std::make_shared<FeedForward>(dim, hidden, tensor, FeedForwardOptions{.activation = options.activation});
  }
}

std::shared_ptr<SelfAttention> make_attention(const TransformerBlockOptions& options, TensorOptionsOfModule tensor) {
  if (options.latent_attention.kv_rank > 0) return std::make_shared<LatentAttention>(options.latent_attention, tensor);
  return std::make_shared<Attention>(options.attention, tensor);
}

/// x + delta, or x if delta is undefined, and its norm.
kernels::ResidualNorm add_norm(const at::Tensor& x, const at::Tensor& delta, const std::shared_ptr<Norm>& norm) {
  const bool must_be_called = norm->has_forward_hooks() || norm->has_input_hook() || norm->has_parameter_hooks();
  if (auto* const rms = dynamic_cast<RMSNorm*>(norm.get()); rms != nullptr && !must_be_called && !norm->has_runner()) {
    return rms->add(x, delta);
  }
  const at::Tensor h = delta.defined() ? x + delta : x;
  return {h, call(norm, h)};
}

}  // namespace

TransformerBlock::TransformerBlock(const TransformerBlockOptions& options, TensorOptionsOfModule tensor)
    : Module("TransformerBlock"), norms_(options.norms), residual_multiplier_(options.residual_multiplier) {
  const auto norm = [&](const char* name) {
    return register_module(name, make_norm(options.norm, options.attention.dim, options.norm_eps, tensor));
  };
  if (options.has_attention) {
    attention = register_module("attention", make_attention(options, tensor));
  }
  if (options.has_feed_forward) {
    const char* name = options.positionwise == PositionwiseKind::experts ? "moe" : "feed_forward";
    feed_forward = register_module(name, make_positionwise(options, tensor));
  }
  if (attention) attention_norm = norm("attention_norm");
  if (feed_forward) ffn_norm = norm("ffn_norm");
  if (options.norms != NormPlacement::both) return;
  if (attention) attention_post_norm = norm("attention_post_norm");
  if (feed_forward) ffn_post_norm = norm("ffn_post_norm");
}

at::Tensor TransformerBlock::forward(at::Tensor x, const RotaryTables& rope,
                                     const std::shared_ptr<const DocumentBoundaries>& documents) {
  return layers(std::move(x), [&](const at::Tensor& normed) { return call(attention, normed, rope, documents); });
}

at::Tensor TransformerBlock::forward(at::Tensor x, const RotaryTables& rope, KvCache& cache, std::int64_t layer) {
  return layers(std::move(x), [&](const at::Tensor& normed) { return call(attention, normed, rope, cache, layer); });
}

template <class Attend>
at::Tensor TransformerBlock::layers(at::Tensor x, const Attend& attend) {
  if (norms_ != NormPlacement::before) return layers_before_norms(std::move(x), attend);
  at::Tensor delta;
  if (attention) {
    const auto [h, normed] = add_norm(x, delta, attention_norm);
    x = h;
    delta = scaled(attend(normed));
  }
  if (!feed_forward) return delta.defined() ? kernels::add_delta(x, delta) : x;
  const auto [h, normed] = add_norm(x, delta, ffn_norm);
  return kernels::add_delta(h, scaled(call(feed_forward, normed)));
}

template <class Attend>
at::Tensor TransformerBlock::layers_before_norms(at::Tensor x, const Attend& attend) {
  const bool both = norms_ == NormPlacement::both;
  const auto add = [&](const auto& net, const std::shared_ptr<Norm>& norm, const std::shared_ptr<Norm>& post_norm) {
    const at::Tensor y = both ? net(call(norm, x)) : net(x);
    x = kernels::add_delta(x, scaled(call(both ? post_norm : norm, y)));
  };
  if (attention) add(attend, attention_norm, attention_post_norm);
  if (feed_forward) add([&](const at::Tensor& in) { return call(feed_forward, in); }, ffn_norm, ffn_post_norm);
  return x;
}

}  // namespace phalanx::nn
