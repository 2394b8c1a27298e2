#include "phalanx/kernels/frozen_weight.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "phalanx/kernels/fusible.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/wide_rows.h"

namespace phalanx::kernels {
namespace {

NarrowMatrix narrow_matrix(const at::Tensor& weight) {
  return {
      .rows = weight.size(0),
      .columns = weight.size(1),
      .device = weight.device(),
      .widen = [&](std::int64_t first, const at::Tensor& wide) { wide.copy_(weight.narrow(0, first, wide.size(0))); }};
}

struct FrozenLinearFunction : torch::autograd::Function<FrozenLinearFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({weight});
    const auto wide_bias = bias ? std::optional(bias->to(x.scalar_type())) : std::nullopt;
    return computed_once(SavedOp::linear, [&] {
      if (widens_by_rows(x)) {
        return std::vector{product_by_rows(x, narrow_matrix(weight), wide_bias.value_or(at::Tensor()))};
      }
      return std::vector{at::linear(x, weight.to(x.scalar_type()), wide_bias)};
    })[0];
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const at::Tensor weight = ctx->get_saved_variables()[0];
    at::Tensor dx;
    if (ctx->needs_input_grad(0)) {
      dx = widens_by_rows(grads[0]) && !at::GradMode::is_enabled()
               ? input_gradient_by_rows(grads[0], narrow_matrix(weight))
               : at::matmul(grads[0], weight.to(grads[0].scalar_type()));
    }
    return {dx, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

bool is_narrow_weight(const at::Tensor& x, const at::Tensor& weight) {
  return x.scalar_type() == at::kFloat && !weight.requires_grad() &&
         (weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kHalf) &&
         !at::autocast::is_autocast_enabled(x.device().type());
}

at::Tensor frozen_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return FrozenLinearFunction::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

bool fusible_product(const at::Tensor& x, const at::Tensor& weight) {
  return fusible(x, weight) || (fusible(x) && is_narrow_weight(x, weight));
}

void product_out(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight) {
  if (x.scalar_type() == weight.scalar_type()) {
    at::Tensor whole = out;
    at::mm_out(whole, x, weight.t());
    return;
  }
  for_wide_rows(narrow_matrix(weight), [&](std::int64_t first, const at::Tensor& wide) {
    at::Tensor columns = out.narrow(1, first, wide.size(0));
    at::mm_out(columns, x, wide.t());
  });
}

void input_gradient_out(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& weight) {
  if (dy.scalar_type() == weight.scalar_type()) {
    at::Tensor whole = out;
    at::mm_out(whole, dy, weight);
    return;
  }
  for_wide_rows(narrow_matrix(weight), [&](std::int64_t first, const at::Tensor& wide) {
    out.addmm_(dy.narrow(1, first, wide.size(0)), wide, first == 0 ? 0.0 : 1.0);
  });
}

}  // namespace phalanx::kernels
