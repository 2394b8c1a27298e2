// Which experts a token goes to, and with which weights.
//
//   scores = shares of all experts (softmax of the logits), or a sigmoid of each logit
//   y      = sum over the k chosen experts e of  scaling * w_e * expert_e(x),
//            w_e: scores_e, or their share of these k
//
// Experts are chosen by their scores, or by these and a bias. With groups only experts of a token's best groups can be
// chosen: a group is as good as its best expert, or, of sigmoids, as its best two together. Of equal scores the expert
// with the lower number is chosen.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "phalanx/models/config/layer_forms.h"

namespace phalanx::nn {

struct RoutingOptions {
  std::int64_t experts_per_token = 1;
  bool normalise = true;  // a token's weights add up to `scaling`
  RouterForm form = RouterForm::softmax;
  std::int64_t groups = 0, groups_per_token = 0;  // 0: none; else neighbours are a group
  double scaling = 1.0;
};

/// fp32 [tokens, experts].
at::Tensor routing_scores(const at::Tensor& logits, RouterForm form);

/// int64 [tokens, experts_per_token]. `bias`: fp32 [experts], or undefined.
at::Tensor chosen_experts(const at::Tensor& scores, const at::Tensor& bias, const RoutingOptions& options);

/// fp32 [tokens, experts_per_token]: the weights of the chosen ones.
at::Tensor routing_weights(const at::Tensor& scores, const at::Tensor& chosen, const RoutingOptions& options);

}  // namespace phalanx::nn
