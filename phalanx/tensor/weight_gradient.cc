#include "phalanx/tensor/weight_gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "phalanx/tensor/grad_ready.h"
#include "phalanx/tensor/scale_in_place.h"

namespace phalanx {
namespace {

// Returns the offered buffer if the next contribution may go there.
std::optional<WeightGradient> offered_buffer(const at::Tensor& weight) {
  const at::Tensor buffer = grad_buffer(weight);
  if (!buffer.defined() || !has_memory(buffer)) return std::nullopt;
  at::Tensor& grad = weight.mutable_grad();
  const bool is_first = !grad.defined();
  if (is_first) {
    reclaim_grad_buffer(weight);
    grad = buffer;
  }
  if (!grad.is_same(buffer)) return std::nullopt;
  return WeightGradient{buffer, is_first ? 0.0 : 1.0, at::Tensor()};
}

std::optional<WeightGradient> in_buffer(const at::Tensor& weight) {
  if (!is_only_accumulated(weight)) return std::nullopt;
  auto found = offered_buffer(weight);
  if (found) mark_grad_arrived(weight);
  return found;
}

}  // namespace

bool is_only_accumulated(const at::Tensor& weight) {
  if (at::GradMode::is_enabled()) return false;  // create_graph: the gradient has a history
  // Not empty in a pass that was asked only for the gradients of certain tensors.
  const auto* asked_for = torch::autograd::get_current_graph_task_exec_info();
  return asked_for != nullptr && asked_for->empty() && torch::autograd::impl::hooks(weight).empty();
}

void add_weight_gradient(const at::Tensor& weight, const std::function<void(const WeightGradient&)>& write) {
  const at::NoGradGuard no_grad;
  if (const auto found = offered_buffer(weight)) return write(*found);
  // As autograd adds: the product is computed separately first, so that the bits are the same.
  at::Tensor made = at::empty_like(weight);
  write({made, 0.0, made});
  at::Tensor& grad = weight.mutable_grad();
  grad.defined() ? void(grad.add_(made)) : void(grad = std::move(made));
}

WeightGradient weight_gradient(const at::Tensor& weight) {
  if (auto found = in_buffer(weight)) return *std::move(found);
  const at::Tensor made = at::empty_like(weight);
  return {made, 0.0, made};
}

std::vector<WeightGradient> weight_gradients(const std::vector<at::Tensor>& weights, const at::Tensor& made_before) {
  std::vector<WeightGradient> result;
  std::int64_t rows = 0;
  for (const at::Tensor& weight : weights) {
    result.push_back(in_buffer(weight).value_or(WeightGradient{}));
    rows += weight.size(0);
  }
  const bool no_buffers = std::ranges::none_of(result, [](const auto& found) { return found.out.defined(); });
  at::Tensor all;
  if (no_buffers) {
    const bool fits = made_before.defined() && made_before.scalar_type() == weights[0].scalar_type();
    all = fits ? made_before : at::empty({rows, weights[0].size(1)}, weights[0].options());
  }
  std::int64_t first = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!result[i].out.defined()) {
      const std::int64_t own = weights[i].size(0);
      // Not a view for autograd, which then takes it over without a copy.
      const at::Tensor made = all.defined() ? all.narrow(0, first, own).variable_data() : at::empty_like(weights[i]);
      result[i] = {made, 0.0, made};
      first += own;
    }
  }
  return result;
}

at::Tensor deliver_float32_sum(const at::Tensor& weight, at::Tensor& sum, const at::Tensor& factor) {
  scale_in_place(sum, factor);
  const WeightGradient to = weight_gradient(weight);
  to.beta == 0.0 ? to.out.copy_(sum) : to.out.add_(sum);
  return to.returned;
}

EarlyWeightGradient::EarlyWeightGradient(const at::Tensor& weight)
    : weight_(weight), buffer_(borrow_grad_buffer(weight)) {
  if (!buffer_) buffer_ = std::make_shared<at::Tensor>(at::empty_like(weight));
}

at::Tensor EarlyWeightGradient::deliver(float factor) {
  return deliver_scaled([factor](at::Tensor& made) {
    if (factor != 1.0F) scale_in_place(made, factor);
  });
}

at::Tensor EarlyWeightGradient::deliver(const at::Tensor& factor) {
  return deliver_scaled([&factor](at::Tensor& made) { scale_in_place(made, factor); });
}

at::Tensor EarlyWeightGradient::deliver_scaled(const std::function<void(at::Tensor&)>& scale) {
  // Hand out the only reference, if it is a separate tensor: only then autograd takes over the returned tensor.
  at::Tensor made = *std::exchange(buffer_, nullptr);
  scale(made);
  const at::Tensor buffer = grad_buffer(weight_);
  if (buffer.defined() && made.is_same(buffer)) {
    if (is_only_accumulated(weight_) && !weight_.grad().defined()) {
      weight_.mutable_grad() = made;
      mark_grad_arrived(weight_);
      return {};
    }
    made = made.clone();
  }
  const auto target = in_buffer(weight_);
  if (!target) return made;
  target->beta == 0.0 ? target->out.copy_(made) : target->out.add_(made);
  return {};
}

}  // namespace phalanx
