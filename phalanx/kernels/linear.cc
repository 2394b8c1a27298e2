#include "phalanx/kernels/linear.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
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

// Queries, keys and values. The weights, wider than x, are cast into the rows of one matrix.
struct GpuLinearsFunction : torch::autograd::Function<GpuLinearsFunction> {
  static torch::autograd::tensor_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_in,
                                              const at::Tensor& w0, const at::Tensor& w1, const at::Tensor& w2) {
    const at::Tensor weights[] = {w0, w1, w2};
    const at::Tensor x = x_in.reshape({-1, x_in.size(-1)}).contiguous();
    std::int64_t width = 0;
    for (const at::Tensor& weight : weights) width += weight.size(0);
    const at::Tensor used = at::empty({width, x.size(1)}, x.options());
    std::int64_t first = 0;
    for (const at::Tensor& weight : weights) {
      used.narrow(0, first, weight.size(0)).copy_(weight);
      first += weight.size(0);
    }
    ctx->save_for_backward({x, used, w0, w1, w2});
    save_queue_for_backward(*ctx);
    std::vector<std::int64_t> shape = x_in.sizes().vec();
    shape.back() = width;
    const at::Tensor all = at::mm(x, used.t()).view(shape);
    torch::autograd::tensor_list parts;
    first = 0;
    for (const at::Tensor& weight : weights) {
      parts.push_back(all.narrow(-1, first, weight.size(0)));
      first += weight.size(0);
    }
    parts.back() = parts.back().contiguous();  // attention keeps values, and with them would keep all three
    return parts;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &used = saved[1];
    const bool has_graph = at::GradMode::is_enabled();  // create_graph: what autograd can follow
    at::Tensor dx;
    torch::autograd::tensor_list returned(1);
    std::int64_t first = 0;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      const at::Tensor &weight = saved[i + 2], dy = grads[i].reshape({-1, weight.size(0)});
      const at::Tensor own = has_graph ? weight.to(x.scalar_type()) : used.narrow(0, first, weight.size(0));
      first += weight.size(0);
      if (ctx->needs_input_grad(0)) {
        if (!dx.defined()) {
          dx = at::mm(dy, own);
        } else {
          dx = has_graph ? at::addmm(dx, dy, own) : dx.addmm_(dy, own);  // addmm copies dx first
        }
      }
      at::Tensor dweight;
      if (has_graph) {
        dweight = dy.t().mm(x);
      } else if (const auto ref = queue_for(*ctx, weight); ref.queue) {
        ref.queue->put(ref.key, weight,
                       [dy, rows = x.detach()](const WeightGradient& out) { add_weight_product(dy, rows, out); });
      } else if (weight.requires_grad()) {
        const WeightGradient out = weight_gradient(weight);
        add_weight_product(dy, x, out);
        dweight = out.returned;
      }
      returned.push_back(dweight);
    }
    std::vector<std::int64_t> shape = grads[0].sizes().vec();
    shape.back() = x.size(1);
    if (dx.defined()) returned[0] = dx.view(shape);
    return returned;
  }
};

bool have_other_types_than(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  return std::ranges::all_of(weights, [&](const at::Tensor& w) { return w.scalar_type() != x.scalar_type(); });
}

}  // namespace

std::vector<at::Tensor> linears(const at::Tensor& x_in, const std::vector<at::Tensor>& weights) {
  const bool is_autocast = at::autocast::is_autocast_enabled(x_in.device().type());
  if (weights.size() == 3 && is_autocast && SavedActivations::current() == nullptr && x_in.numel() > 0 &&
      gpu_launch(x_in)) {
    if (const at::Tensor x = in_autocast_type(x_in); have_other_types_than(x, weights)) {
      return GpuLinearsFunction::apply(x, weights[0], weights[1], weights[2]);
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
