#include "phalanx/nn/routing.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

namespace phalanx::nn {
namespace {

/// Of equal values, those with the lowest indices. `values`: fp32 [tokens, n].
at::Tensor indices_of_largest(const at::Tensor& values, std::int64_t k) {
  constexpr std::int64_t kMagnitude = 0x7fffffff;
  // Whole numbers in the order of the values: those of negative values are turned round, as they grow downwards.
  const at::Tensor bits = values.contiguous().view(at::kInt);
  const at::Tensor ordered = bits.bitwise_xor(bits.bitwise_right_shift(31).bitwise_and(kMagnitude)).to(at::kLong);
  const std::int64_t n = values.size(-1);
  const at::Tensor behind = at::arange(n - 1, -1, -1, ordered.options());
  return std::get<1>(at::topk(ordered * n + behind, k));
}

/// `scores`, and minus infinity in groups that are not among a token's best.
at::Tensor of_best_groups(const at::Tensor& scores, const RoutingOptions& options) {
  const at::Tensor grouped = scores.unflatten(-1, {options.groups, -1});  // [tokens, groups, experts of a group]
  const at::Tensor of_group =
      options.form == RouterForm::softmax ? at::amax(grouped, -1) : std::get<0>(at::topk(grouped, 2)).sum(-1);
  const at::Tensor is_open =
      at::zeros_like(of_group, at::kBool).scatter(-1, indices_of_largest(of_group, options.groups_per_token), true);
  return grouped.masked_fill(is_open.logical_not().unsqueeze(-1), -std::numeric_limits<double>::infinity()).flatten(-2);
}

}  // namespace

at::Tensor routing_scores(const at::Tensor& logits, RouterForm form) {
  return form == RouterForm::softmax ? at::softmax(logits, -1, at::kFloat) : at::sigmoid(logits.to(at::kFloat));
}

at::Tensor chosen_experts(const at::Tensor& scores, const at::Tensor& bias, const RoutingOptions& options) {
  const at::Tensor values = scores.detach();
  const at::Tensor biased = bias.defined() ? values + bias : values;
  return indices_of_largest(options.groups > 0 ? of_best_groups(biased, options) : biased, options.experts_per_token);
}

at::Tensor routing_weights(const at::Tensor& scores, const at::Tensor& chosen, const RoutingOptions& options) {
  at::Tensor weights = scores.gather(-1, chosen);
  // Sigmoids may all be 0.
  const double least = options.form == RouterForm::softmax ? 0.0 : 1e-20;
  if (options.normalise) weights = weights / (weights.sum(-1, /*keepdim=*/true) + least);
  return options.scaling == 1.0 ? weights : weights * options.scaling;
}

}  // namespace phalanx::nn
