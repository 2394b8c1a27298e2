#include "phalanx/kernels/fused_linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "phalanx/kernels/deferred_weights.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/saved_activations.h"
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
  std::int64_t rows = 0;
  for (const at::Tensor& weight : weights) rows += weight.size(0);
  return at::as_strided(weights[0].detach(), {rows, weights[0].size(1)}, {weights[0].size(1), 1});
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
