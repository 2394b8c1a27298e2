#include "phalanx/tensor/weight_gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "phalanx/tensor/grad_ready.h"

namespace phalanx {
namespace {

// Whether autograd would do no more with the gradient than add it to weight.grad().
bool is_only_accumulated(const at::Tensor& weight) {
  if (at::GradMode::is_enabled()) return false;  // create_graph: the gradient has a history
  // Not empty in a pass that was asked for the gradients of certain tensors only.
  const auto* asked_for = torch::autograd::get_current_graph_task_exec_info();
  return asked_for != nullptr && asked_for->empty() && torch::autograd::impl::hooks(weight).empty();
}

}  // namespace

WeightGradient weight_gradient(const at::Tensor& weight) {
  const at::Tensor buffer = grad_buffer(weight);
  if (buffer.defined() && is_only_accumulated(weight)) {
    at::Tensor& grad = weight.mutable_grad();
    const bool is_first = !grad.defined();
    if (is_first) grad = buffer;
    if (grad.is_same(buffer)) {
      mark_grad_arrived(weight);
      return {buffer, is_first ? 0.0 : 1.0, at::Tensor()};
    }
  }
  const at::Tensor made = at::empty_like(weight);
  return {made, 0.0, made};
}

}  // namespace phalanx
