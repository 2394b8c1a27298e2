// Helpers for backward functions: find the queue in which weight gradients may be left
// (tensor/weight_gradient_queue.h).
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx::kernels {

struct SavedQueueRef : torch::CustomClassHolder {
  explicit SavedQueueRef(WeightGradientQueue::Ref ref) : ref(std::move(ref)) {}
  WeightGradientQueue::Ref ref;
};

/// Call in forward().
inline void save_queue_for_backward(torch::autograd::AutogradContext& ctx) {
  auto ref = WeightGradientQueue::current();
  if (!ref.queue) return;
  ctx.saved_data["queue"] = c10::IValue::make_capsule(c10::make_intrusive<SavedQueueRef>(std::move(ref)));
}

/// Call in backward(). Returns the queue for the gradients of these weights if all of them may be deferred, otherwise
/// an empty Ref.
template <class... Weights>
WeightGradientQueue::Ref queue_for(const torch::autograd::AutogradContext& ctx, const Weights&... weights) {
  const auto found = ctx.saved_data.find("queue");
  if (found == ctx.saved_data.end()) return {};
  const auto capsule = found->second.toCapsule();
  const auto& ref = static_cast<const SavedQueueRef&>(*capsule).ref;
  return (ref.queue->defers(weights) && ...) ? ref : WeightGradientQueue::Ref();
}

}  // namespace phalanx::kernels
