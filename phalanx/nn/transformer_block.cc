#include "phalanx/nn/transformer_block.h"

#include <ATen/TensorOperators.h>

#include <utility>

#include "phalanx/nn/feed_forward.h"
#include "phalanx/nn/mixture_of_experts.h"
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
      return std::make_shared<MixtureOfExperts>(
          MixtureOptions{
              .dim = dim, .hidden = hidden, .experts = options.experts, .experts_per_token = options.experts_per_token},
          tensor);
    default:
      return std::make_shared<FeedForward>(dim, hidden, tensor);
  }
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

at::Tensor TransformerBlock::forward(at::Tensor x, const RotaryTables& rope,
                                     const std::shared_ptr<const DocumentBoundaries>& documents) {
  return layers(std::move(x), [&](const at::Tensor& normed) { return call(attention, normed, rope, documents); });
}

at::Tensor TransformerBlock::forward(at::Tensor x, const RotaryTables& rope, KvCache& cache, std::int64_t layer) {
  return layers(std::move(x), [&](const at::Tensor& normed) { return call(attention, normed, rope, cache, layer); });
}

template <class Attend>
at::Tensor TransformerBlock::layers(at::Tensor x, const Attend& attend) {
  at::Tensor delta;
  if (attention) {
    const auto [h, normed] = add_norm(x, delta, attention_norm);
    x = h;
    delta = attend(normed);
  }
  if (!feed_forward) return delta.defined() ? kernels::add_delta(x, delta) : x;
  const auto [h, normed] = add_norm(x, delta, ffn_norm);
  return kernels::add_delta(h, call(feed_forward, normed));
}

}  // namespace phalanx::nn
