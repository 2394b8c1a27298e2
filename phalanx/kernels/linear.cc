#include "phalanx/kernels/linear.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/deferred_weights.h"
#include "phalanx/kernels/frozen_weight.h"
#include "phalanx/kernels/fused_linear.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/skinny_gemm.h"
#include "phalanx/kernels/weight_product.h"
#include "phalanx/tensor/grad_ready.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx::kernels {
namespace {

// The weight may be wider than x, as under autocast: it is cast to x's type here, and its gradient is made in its own.
struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    const at::Tensor used = weight.to(x.scalar_type());
    ctx->save_for_backward({x, weight, used.is_same(weight) ? at::Tensor() : used});
    // Not saved as a variable: its values are not needed.
    if (bias) ctx->saved_data["bias"] = *bias;
    save_queue_for_backward(*ctx);
    const auto used_bias = bias ? std::optional(bias->to(x.scalar_type())) : std::nullopt;
    return computed_once(SavedOp::linear, [&] { return std::vector{at::linear(x, used, used_bias)}; })[0];
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor dy = grads[0].reshape({-1, weight.size(0)}), rows = x.reshape({-1, weight.size(1)});
    at::Tensor dx, dbias;
    if (ctx->needs_input_grad(0)) {
      const bool is_cast = saved[2].defined() && !at::GradMode::is_enabled();
      dx = at::matmul(grads[0], is_cast ? saved[2] : weight.to(x.scalar_type()));
    }
    const auto bias = ctx->saved_data.find("bias");
    const bool has_bias = bias != ctx->saved_data.end() && ctx->needs_input_grad(2);
    if (ctx->needs_input_grad(1) && !at::GradMode::is_enabled()) {
      if (const auto ref = queue_for(*ctx, weight); ref.queue) {
        ref.queue->put(ref.key, weight, [dy, rows = rows.detach()](const WeightGradient& dweight) {
          add_weight_product(dy, rows, dweight);
        });
        if (has_bias && ref.queue->defers(bias->second.toTensor())) {
          ref.queue->put(ref.key, bias->second.toTensor(), [dy](const WeightGradient& dbias) {
            dbias.beta == 0.0 ? dbias.out.copy_(dy.sum(0)) : dbias.out.add_(dy.sum(0));
          });
          return {dx, at::Tensor(), at::Tensor()};
        }
        return {dx, at::Tensor(), has_bias ? dy.sum(0) : at::Tensor()};
      }
    }
    if (has_bias) dbias = dy.sum(0);
    if (!ctx->needs_input_grad(1)) return {dx, at::Tensor(), dbias};
    if (at::GradMode::is_enabled()) return {dx, dy.t().mm(rows), dbias};  // create_graph: what autograd can follow
    const WeightGradient dweight = weight_gradient(weight);
    add_weight_product(dy, rows, dweight);
    return {dx, dweight.returned, dbias};
  }
};

// Queries, keys and values, by one product. The weights are adjacent; or wider than x, and cast into the rows of one
// matrix.
struct GpuLinearsFunction : torch::autograd::Function<GpuLinearsFunction> {
  static torch::autograd::tensor_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_in,
                                              const at::Tensor& w0, const at::Tensor& w1, const at::Tensor& w2,
                                              bool record) {
    const std::vector<at::Tensor> weights = {w0, w1, w2};
    const at::Tensor x = x_in.reshape({-1, x_in.size(-1)}).contiguous();
    const bool is_cast = w0.scalar_type() != x.scalar_type();
    const at::Tensor used = stacked_as(x.scalar_type(), weights);
    if (record) {
      ctx->save_for_backward({x, is_cast ? used : at::Tensor(), w0, w1, w2});
      save_queue_for_backward(*ctx);
    }
    std::vector<std::int64_t> shape = x_in.sizes().vec();
    shape.back() = used.size(0);
    const auto product = [&] { return std::vector{at::mm(x, used.t())}; };
    const at::Tensor all = computed_once(SavedOp::linear, product)[0].view(shape);
    torch::autograd::tensor_list parts;
    std::int64_t first = 0;
    for (const at::Tensor& weight : weights) {
      parts.push_back(all.narrow(-1, first, weight.size(0)));
      first += weight.size(0);
    }
    if (record) parts.back() = parts.back().contiguous();  // attention keeps values, and with them would keep all three
    return parts;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const std::vector<at::Tensor> weights(saved.begin() + 2, saved.end());
    const bool is_followed = at::GradMode::is_enabled();  // create_graph: what autograd can follow
    torch::autograd::tensor_list dys, returned(5);
    for (std::size_t i = 0; i < weights.size(); ++i) dys.push_back(grads[i].reshape({-1, weights[i].size(0)}));
    const at::Tensor dy = at::cat(dys, 1);
    if (ctx->needs_input_grad(0)) {
      const at::Tensor used = is_followed          ? at::cat(weights).to(x.scalar_type())
                              : saved[1].defined() ? saved[1]
                                                   : stacked(weights);
      std::vector<std::int64_t> shape = grads[0].sizes().vec();
      shape.back() = x.size(1);
      returned[0] = at::mm(dy, used).view(shape);
    }
    const bool made_now = std::ranges::all_of(
        weights, [&](const at::Tensor& w) { return w.requires_grad() && !queue_for(*ctx, w).queue; });
    if (made_now && !is_followed) {
      const auto made = stacked_weight_gradients(dy, x, weights);
      std::ranges::copy(made, returned.begin() + 1);
      return returned;
    }
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (!weights[i].requires_grad()) continue;
      if (is_followed) {
        returned[i + 1] = dys[i].t().mm(x);
      } else if (const auto ref = queue_for(*ctx, weights[i]); ref.queue) {
        ref.queue->put(ref.key, weights[i], [dy = dys[i], rows = x.detach()](const WeightGradient& out) {
          add_weight_product(dy, rows, out);
        });
      } else {
        const WeightGradient out = weight_gradient(weights[i]);
        add_weight_product(dys[i], x, out);
        returned[i + 1] = out.returned;
      }
    }
    return returned;
  }
};

bool have_type_of(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  return std::ranges::all_of(weights, [&](const at::Tensor& w) { return w.scalar_type() == x.scalar_type(); });
}

bool have_other_types_than(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  return std::ranges::all_of(weights, [&](const at::Tensor& w) { return w.scalar_type() != x.scalar_type(); });
}

}  // namespace

std::vector<at::Tensor> linears(const at::Tensor& x_in, const std::vector<at::Tensor>& weights) {
  if (weights.size() == 3 && x_in.numel() > 0 && gpu_launch(x_in)) {
    const bool is_autocast = at::autocast::is_autocast_enabled(x_in.device().type());
    const at::Tensor x = is_autocast ? in_autocast_type(x_in) : x_in;
    const bool needs_cast = is_autocast && have_other_types_than(x, weights);
    if (needs_cast || (have_type_of(x, weights) && are_adjacent(weights))) {
      const bool record =
          at::GradMode::is_enabled() &&
          (x.requires_grad() || std::ranges::any_of(weights, [](const at::Tensor& w) { return w.requires_grad(); }));
      return GpuLinearsFunction::apply(x, weights[0], weights[1], weights[2], record);
    }
  }
  std::vector<at::Tensor> results;
  results.reserve(weights.size());
  for (const at::Tensor& weight : weights) results.push_back(kernels::linear(x_in, weight));
  return results;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool is_autocast =
      at::autocast::is_autocast_enabled(x.device().type()) && x.is_floating_point() && x.scalar_type() != at::kDouble;
  if (is_autocast &&
      ((at::GradMode::is_enabled() && weight.requires_grad()) || SavedActivations::current() != nullptr)) {
    // What autocast would do in at::linear(), by our own function, whose output may be saved.
    return LinearFunction::apply(in_autocast_type(x), weight, bias.defined() ? std::optional(bias) : std::nullopt);
  }
  if (is_narrow_weight(x, weight)) return frozen_linear(x, weight, bias);
  const bool plain = x.scalar_type() == weight.scalar_type() && !is_autocast;
  const bool is_trained = at::GradMode::is_enabled() && weight.requires_grad() && plain;
  const bool brings_gradient = is_trained && (grad_buffer(weight).defined() || WeightGradientQueue::current().queue);
  const bool may_be_saved = plain && SavedActivations::current() != nullptr;
  if (!brings_gradient && !may_be_saved) {
    if (!can_use_skinny_gemm(x, weight)) return at::linear(x, weight, bias);
    const at::Tensor y = skinny_gemm(x, weight);
    return bias.defined() ? y.add_(bias) : y;
  }
  return LinearFunction::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

}  // namespace phalanx::kernels
