#include "phalanx/kernels/linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <vector>

#include "phalanx/kernels/kept_outputs.h"
#include "phalanx/tensor/grad_ready.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx::kernels {
namespace {

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    return computed_once(KeptOp::linear, [&] { return std::vector{at::linear(x, weight, bias)}; })[0];
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor dy = grads[0].reshape({-1, weight.size(0)}), rows = x.reshape({-1, weight.size(1)});
    at::Tensor dx, dbias;
    if (ctx->needs_input_grad(0)) dx = at::matmul(grads[0], weight);
    if (ctx->saved_data["has_bias"].toBool()) dbias = dy.sum(0);
    if (!ctx->needs_input_grad(1)) return {dx, at::Tensor(), dbias};
    if (at::GradMode::is_enabled()) return {dx, dy.t().mm(rows), dbias};  // create_graph: what autograd can follow
    const WeightGradient dweight = weight_gradient(weight);
    dweight.out.addmm_(dy.t(), rows, dweight.beta);
    return {dx, dweight.returned, dbias};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool plain = x.scalar_type() == weight.scalar_type() && !at::autocast::is_autocast_enabled(x.device().type());
  const bool has_buffer =
      at::GradMode::is_enabled() && weight.requires_grad() && plain && grad_buffer(weight).defined();
  const bool may_be_kept = plain && KeptOutputs::current() != nullptr;
  if (!has_buffer && !may_be_kept) return at::linear(x, weight, bias);
  return LinearFunction::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

}  // namespace phalanx::kernels
