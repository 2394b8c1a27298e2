// How a backward function finds the queue that its weight gradients may be left in (tensor/weight_gradient_queue.h).
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx::kernels {

struct SavedQueueRef : torch::CustomClassHolder {
  explicit SavedQueueRef(WeightGradientQueue::Ref ref) : ref(std::move(ref)) {}
  WeightGradientQueue::Ref ref;
};

/// In forward().
inline void save_queue_for_backward(torch::autograd::AutogradContext& ctx) {
  auto ref = WeightGradientQueue::current();
  if (!ref.queue) return;
  ctx.saved_data["queue"] = c10::IValue::make_capsule(c10::make_intrusive<SavedQueueRef>(std::move(ref)));
}

/// In backward(): the place for the gradients of these weights, if every one of them may wait; an empty one if not.
template <class... Weights>
WeightGradientQueue::Ref queue_for(const torch::autograd::AutogradContext& ctx, const Weights&... weights) {
  const auto found = ctx.saved_data.find("queue");
  if (found == ctx.saved_data.end()) return {};
  const auto capsule = found->second.toCapsule();
  const auto& ref = static_cast<const SavedQueueRef&>(*capsule).ref;
  return (ref.queue->defers(weights) && ...) ? ref : WeightGradientQueue::Ref();
}

}  // namespace phalanx::kernels
