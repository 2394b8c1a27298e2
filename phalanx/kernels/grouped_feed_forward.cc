#include "phalanx/kernels/grouped_feed_forward.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/fused_linear.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/kernels/swiglu_feed_forward.h"

namespace phalanx::kernels {
namespace {

using torch::autograd::tensor_list;

constexpr std::int64_t kGroupMultiple = 8;  // elements of 16 bits in 16 bytes, which the kernels need
constexpr std::int64_t kMostGroups = 1023;  // of CUDA's kernels

bool has_grouped_products(at::Device device) {
  if (device.is_cuda()) return gpu::cuda_capability(device.index()) == 9;
  static const auto op = c10::Dispatcher::singleton().findSchema({"aten::_grouped_mm", ""});
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, device);
  return !device.is_cpu() && op && op->hasKernelForDispatchKey(key);
}

/// [experts, rows, columns] of weights that are adjacent: `each` weights of an expert are one matrix.
at::Tensor by_expert(at::ScalarType type, const std::vector<at::Tensor>& weights, std::int64_t experts) {
  return stacked_as(type, weights).unflatten(0, {experts, -1});
}

/// Zeros in the rows behind the last end: no product has written them.
void clear_behind(at::Tensor& rows, const at::Tensor& ends) {
  const at::Tensor number = at::arange(rows.size(0), ends.options());
  rows.masked_fill_(number.ge(ends.select(0, -1)).unsqueeze(1), 0.0);
}

/// What backward() returns for each weight; `made` [experts, rows, columns] are the gradients of all.
tensor_list deliver(const std::vector<at::Tensor>& weights, const at::Tensor& made) {
  return deliver_stacked_gradients(made.flatten(0, 1), weights);
}

// Weights: w1 and w3 of every expert, then w2 of every expert.
struct GroupedFeedForward : torch::autograd::Function<GroupedFeedForward> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& ends,
                            at::TensorList weights, bool covers_all, bool record) {
    const std::int64_t experts = ends.size(0);
    const std::vector<at::Tensor> gates_and_ups = weights.slice(0, 2 * experts).vec(),
                                  downs = weights.slice(2 * experts).vec();
    const at::ScalarType type = x.scalar_type();
    const bool is_cast = weights[0].scalar_type() != type;
    const at::Tensor w13 = by_expert(type, gates_and_ups, experts), w2 = by_expert(type, downs, experts);
    const std::int64_t hidden = w2.size(2);
    const at::Tensor gate_up = at::_grouped_mm(x, w13.transpose(1, 2), ends);
    const at::Tensor product = at::empty({x.size(0), hidden}, x.options());
    swiglu_into(gate_up.narrow(1, 0, hidden), gate_up.narrow(1, hidden, hidden), product);
    at::Tensor y = at::_grouped_mm(product, w2.transpose(1, 2), ends);
    if (!covers_all) clear_behind(y, ends);
    if (record) {
      ctx->saved_data["covers_all"] = covers_all;
      tensor_list saved = {x, ends, gate_up, is_cast ? w13 : at::Tensor(), is_cast ? w2 : at::Tensor()};
      saved.insert(saved.end(), weights.begin(), weights.end());
      ctx->save_for_backward(saved);
    }
    return y;
  }

  static tensor_list backward(torch::autograd::AutogradContext* ctx, const tensor_list& grads) {
    require_no_graph("grouped_feed_forward");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &ends = saved[1], &gate_up = saved[2];
    const std::int64_t experts = ends.size(0);
    const std::vector<at::Tensor> gates_and_ups(saved.begin() + 5, saved.begin() + 5 + 2 * experts),
        downs(saved.begin() + 5 + 2 * experts, saved.end());
    const at::ScalarType type = x.scalar_type();
    const at::Tensor w13 = saved[3].defined() ? saved[3] : by_expert(type, gates_and_ups, experts);
    const at::Tensor w2 = saved[4].defined() ? saved[4] : by_expert(type, downs, experts);
    const std::int64_t hidden = w2.size(2);
    const at::Tensor dy = grads[0].contiguous();
    const at::Tensor dgate_up = at::empty_like(gate_up);
    tensor_list result(2 + 3 * static_cast<std::size_t>(experts) + 2);
    {
      const at::Tensor dproduct = at::_grouped_mm(dy, w2, ends), product = at::empty_like(dproduct);
      swiglu_backward_into(gate_up.narrow(1, 0, hidden), gate_up.narrow(1, hidden, hidden), dproduct,
                           dgate_up.narrow(1, 0, hidden), dgate_up.narrow(1, hidden, hidden), product);
      if (downs[0].requires_grad()) {
        std::ranges::move(deliver(downs, at::_grouped_mm(dy.t(), product, ends)), result.begin() + 2 + 2 * experts);
      }
    }
    if (gates_and_ups[0].requires_grad()) {
      std::ranges::move(deliver(gates_and_ups, at::_grouped_mm(dgate_up.t(), x, ends)), result.begin() + 2);
    }
    if (ctx->needs_input_grad(0)) {
      result[0] = at::_grouped_mm(dgate_up, w13, ends);
      if (!ctx->saved_data["covers_all"].toBool()) clear_behind(result[0], ends);
    }
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> ExpertWeights::gates_and_ups() const {
  std::vector<at::Tensor> all;
  for (std::size_t i = 0; i < w1.size(); ++i) all.insert(all.end(), {w1[i], w3[i]});
  return all;
}

bool can_group_experts(const at::Tensor& rows, const ExpertWeights& weights) {
  if (weights.w1.empty() || rows.dim() != 2 || rows.size(0) == 0 || !gpu_launch(rows)) return false;
  if (!has_grouped_products(rows.device()) || std::ssize(weights.w1) > kMostGroups) return false;
  const at::Tensor x = in_autocast_type(rows);
  const at::Tensor& first = weights.w1[0];
  const bool is_autocast = at::autocast::is_autocast_enabled(rows.device().type());
  if (x.scalar_type() != at::kBFloat16 || (!is_autocast && first.scalar_type() != at::kBFloat16)) return false;
  if (first.dim() != 2 || first.size(0) % kGroupMultiple != 0 || first.size(1) % kGroupMultiple != 0) return false;
  const std::vector<at::Tensor> gates_and_ups = weights.gates_and_ups();
  const auto fit = [&](const std::vector<at::Tensor>& all, at::IntArrayRef sizes) {
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(all[0].const_data_ptr()) % 16 == 0;
    return is_aligned && are_adjacent(all) && std::ranges::all_of(all, [&](const at::Tensor& w) {
             return w.sizes() == sizes && w.scalar_type() == first.scalar_type() &&
                    w.requires_grad() == first.requires_grad();
           });
  };
  return fit(gates_and_ups, first.sizes()) && fit(weights.w2, {first.size(1), first.size(0)});
}

at::Tensor grouped_feed_forward(const at::Tensor& rows, const at::Tensor& ends, const ExpertWeights& weights,
                                bool covers_all) {
  const at::Tensor x = in_autocast_type(rows).contiguous();
  std::vector<at::Tensor> all = weights.gates_and_ups();
  all.insert(all.end(), weights.w2.begin(), weights.w2.end());
  const bool record = at::GradMode::is_enabled() && (x.requires_grad() || all[0].requires_grad());
  return GroupedFeedForward::apply(x, ends, at::TensorList(all), covers_all, record);
}

}  // namespace phalanx::kernels
