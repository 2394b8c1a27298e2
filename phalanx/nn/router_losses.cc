#include "phalanx/nn/router_losses.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/custom_function.h>

#include "phalanx/nn/expert_counts.h"

namespace phalanx::nn {
namespace {

struct AddZLossGradient : torch::autograd::Function<AddZLossGradient> {
  /// `weight`: of each token's loss, 0-dim.
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& weight) {
    ctx->save_for_backward({logits});
    ctx->saved_data["weight"] = weight;
    return logits.view_as(logits);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const at::Tensor logits = ctx->get_saved_variables()[0].to(at::kFloat);  // [tokens, experts]
    const at::Tensor z = at::logsumexp(logits, -1, /*keepdim=*/true);
    const at::Tensor own = at::exp(logits - z) * (z * (2 * ctx->saved_data["weight"].toTensor()));
    return {grads[0] + own.to(grads[0].scalar_type()), at::Tensor()};
  }
};

struct AddLoadLossGradient : torch::autograd::Function<AddLoadLossGradient> {
  /// `gradient`: [units, 1 or tokens of a unit, experts].
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& scores,
                            const at::Tensor& gradient) {
    ctx->saved_data["gradient"] = gradient;
    return scores.view_as(scores);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const at::Tensor own = ctx->saved_data["gradient"].toTensor();
    const at::Tensor& of_result = grads[0];  // [tokens, experts]
    const at::Tensor sum = of_result.view({own.size(0), -1, own.size(2)}) + own;
    return {sum.view(of_result.sizes()), at::Tensor()};
  }
};

/// f_e of each unit: fp32 [units, 1, experts].
at::Tensor shares_of_choices(const at::Tensor& chosen, std::int64_t units, std::int64_t experts,
                             const RouterLosses& losses) {
  const at::Tensor counts = count_choices(chosen.reshape({units, -1}), experts);
  if (losses.sum_counts) losses.sum_counts(counts);
  return (counts.to(at::kDouble) / counts.sum(1, /*keepdim=*/true)).to(at::kFloat).unsqueeze(1);
}

/// The gradient of scores [tokens, experts] from that of their shares of all experts: [units, tokens, experts].
at::Tensor gradient_of_scores(const at::Tensor& of_shares, const at::Tensor& scores) {
  const at::Tensor s = scores.view({of_shares.size(0), -1, of_shares.size(2)});
  const at::Tensor sum = s.sum(-1, /*keepdim=*/true) + 1e-20;  // sigmoids may all be 0
  return (of_shares - (of_shares * s).sum(-1, /*keepdim=*/true) / sum) / sum;
}

}  // namespace

at::Tensor with_z_loss(const at::Tensor& logits, const RouterLosses& losses) {
  const at::Tensor one = at::ones({}, logits.options().dtype(at::kFloat));
  const at::Tensor scale = losses.loss_scale.defined() ? losses.loss_scale : one;
  return AddZLossGradient::apply(logits, scale * losses.z_weight);
}

at::Tensor with_load_loss(const at::Tensor& scores, const at::Tensor& chosen, std::int64_t sequences, RouterForm form,
                          const RouterLosses& losses) {
  const std::int64_t units = losses.load_unit == LoadUnit::sequence ? sequences : 1, experts = scores.size(1);
  const std::int64_t tokens_of_sequence = scores.size(0) / sequences * losses.sequence_ranks;
  at::Tensor gradient = shares_of_choices(chosen, units, experts, losses) *
                        (losses.load_weight * static_cast<double>(experts) / static_cast<double>(tokens_of_sequence));
  if (form != RouterForm::softmax) gradient = gradient_of_scores(gradient, scores.detach());
  if (losses.loss_scale.defined()) gradient = gradient * losses.loss_scale;
  return AddLoadLossGradient::apply(scores, gradient);
}

}  // namespace phalanx::nn
