#include "phalanx/kernels/fused_linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "phalanx/kernels/deferred_weights.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/weight_product.h"
#include "phalanx/tensor/grad_ready.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx::kernels {
namespace {

struct FusedLinearFunction : torch::autograd::Function<FusedLinearFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, at::TensorList weights) {
    std::vector<at::Tensor> saved = {x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    save_queue_for_backward(*ctx);
    return computed_once(SavedOp::linear, [&] { return std::vector{at::linear(x, stacked(weights.vec()))}; })[0];
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const std::vector<at::Tensor> weights(saved.begin() + 1, saved.end());
    const bool is_followed = at::GradMode::is_enabled();  // create_graph: what autograd can follow
    const at::Tensor rows = saved[0].reshape({-1, saved[0].size(-1)});
    const at::Tensor dy = grads[0].reshape({rows.size(0), -1});
    torch::autograd::tensor_list result(saved.size());
    if (ctx->needs_input_grad(0)) result[0] = at::matmul(grads[0], is_followed ? at::cat(weights) : stacked(weights));
    std::int64_t first = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor& weight = weights[i];
      const at::Tensor part = dy.narrow(1, first, weight.size(0));
      first += weight.size(0);
      if (!ctx->needs_input_grad(i + 1)) continue;
      if (is_followed) {
        result[i + 1] = part.t().mm(rows);
      } else if (const auto later = queue_for(*ctx, weight); later.queue) {
        later.queue->put(later.key, weight, [part, rows = rows.detach()](const WeightGradient& dweight) {
          dweight.out.addmm_(part.t(), rows, dweight.beta);
        });
      } else {
        const WeightGradient dweight = weight_gradient(weight);
        dweight.out.addmm_(part.t(), rows, dweight.beta);
        result[i + 1] = dweight.returned;
      }
    }
    return result;
  }
};

std::int64_t rows_of_all(const std::vector<at::Tensor>& weights) {
  return std::accumulate(weights.begin(), weights.end(), std::int64_t{0},
                         [](std::int64_t rows, const at::Tensor& weight) { return rows + weight.size(0); });
}

bool are_alike(const std::vector<at::Tensor>& parameters) {
  const at::Tensor& first = parameters[0];
  return std::ranges::all_of(parameters, [&](const at::Tensor& p) {
    return p.dim() == 2 && p.size(1) == first.size(1) && p.scalar_type() == first.scalar_type() &&
           p.device() == first.device();
  });
}

void move_into(const at::Tensor& all, const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  std::int64_t from = 0;
  for (const at::Tensor& parameter : parameters) {
    parameter.set_data(all.narrow(0, from, parameter.size(0)));
    from += parameter.size(0);
  }
}

/// Where the gradients of several weights go.
struct StackedGradients {
  /// `made`: as of weight_gradients().
  StackedGradients(const std::vector<at::Tensor>& weights, const at::Tensor& made)
      : each(weight_gradients(weights, made)) {
    std::vector<at::Tensor> outs;
    for (const WeightGradient& one : each) outs.push_back(one.out);
    const bool are_one = std::ranges::all_of(each, [&](const auto& one) { return one.beta == each[0].beta; });
    if (are_one && are_adjacent(outs)) all = stacked(outs);
  }
  std::vector<at::Tensor> returned() const {
    std::vector<at::Tensor> result;
    for (const WeightGradient& one : each) result.push_back(one.returned);
    return result;
  }
  template <class Write>
  void for_each(const Write& write) const {
    std::int64_t first = 0;
    for (const WeightGradient& one : each) {
      write(one, first, one.out.size(0));
      first += one.out.size(0);
    }
  }
  std::vector<WeightGradient> each;
  at::Tensor all;  // their outs, if they are adjacent and have one beta
};

}  // namespace

bool are_adjacent(const std::vector<at::Tensor>& weights) {
  std::int64_t next = weights[0].storage_offset();
  return std::ranges::all_of(weights, [&](const at::Tensor& weight) {
    const bool is_next =
        weight.is_contiguous() && weight.storage().is_alias_of(weights[0].storage()) && weight.storage_offset() == next;
    next += weight.numel();
    return is_next;
  });
}

at::Tensor stacked(const std::vector<at::Tensor>& weights) {
  const at::NoGradGuard no_grad;
  if (!are_adjacent(weights)) return at::cat(weights);
  return at::as_strided(weights[0].detach(), {rows_of_all(weights), weights[0].size(1)}, {weights[0].size(1), 1});
}

at::Tensor stacked_as(at::ScalarType type, const std::vector<at::Tensor>& weights) {
  const at::NoGradGuard no_grad;
  if (weights[0].scalar_type() == type || are_adjacent(weights)) return stacked(weights).to(type);
  std::int64_t first = 0;
  at::Tensor all = at::empty({rows_of_all(weights), weights[0].size(1)}, weights[0].options().dtype(type));
  for (const at::Tensor& weight : weights) {
    all.narrow(0, first, weight.size(0)).copy_(weight);
    first += weight.size(0);
  }
  return all;
}

void make_adjacent(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  if (!std::ranges::all_of(parameters, has_memory) || !are_alike(parameters) || are_adjacent(parameters)) return;
  move_into(at::cat(parameters), parameters);
}

void allocate_adjacent(const std::vector<at::Tensor>& parameters) {
  if (std::ranges::any_of(parameters, has_memory) || !are_alike(parameters)) return;
  move_into(at::empty({rows_of_all(parameters), parameters[0].size(1)}, parameters[0].options()), parameters);
}

std::vector<at::Tensor> stacked_weight_gradients(const at::Tensor& dy, const at::Tensor& x,
                                                 const std::vector<at::Tensor>& weights) {
  const StackedGradients to(weights, at::Tensor());
  if (to.all.defined()) {
    add_weight_product(dy, x, {to.all, to.each[0].beta, at::Tensor()});
  } else {
    to.for_each([&](const WeightGradient& out, std::int64_t first, std::int64_t rows) {
      add_weight_product(dy.narrow(1, first, rows), x, out);
    });
  }
  return to.returned();
}

std::vector<at::Tensor> deliver_stacked_gradients(const at::Tensor& made, const std::vector<at::Tensor>& weights) {
  const StackedGradients to(weights, made);
  if (to.all.defined()) {
    if (!to.all.is_alias_of(made)) to.each[0].beta == 0.0 ? to.all.copy_(made) : to.all.add_(made);
  } else {
    to.for_each([&](const WeightGradient& out, std::int64_t first, std::int64_t rows) {
      const at::Tensor part = made.narrow(0, first, rows);
      out.beta == 0.0 ? out.out.copy_(part) : out.out.add_(part);
    });
  }
  return to.returned();
}

at::Tensor fused_linear(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  const bool is_plain = !at::autocast::is_autocast_enabled(x.device().type()) &&
                        std::ranges::all_of(weights, [&](const at::Tensor& w) { return w.dtype() == x.dtype(); });
  if (is_plain) return FusedLinearFunction::apply(x, at::TensorList(weights));
  std::vector<at::Tensor> ys;
  for (const at::Tensor& weight : weights) ys.push_back(kernels::linear(x, weight));
  return at::cat(ys, -1);
}

}  // namespace phalanx::kernels
