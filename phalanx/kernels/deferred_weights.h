// How a backward function finds the queue that its weight gradients may be left in (tensor/weight_gradient_queue.h).
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx::kernels {

struct RememberedPlace : torch::CustomClassHolder {
  explicit RememberedPlace(WeightGradientQueue::Place place) : place(std::move(place)) {}
  WeightGradientQueue::Place place;
};

/// In forward().
inline void remember_queue(torch::autograd::AutogradContext& ctx) {
  auto place = WeightGradientQueue::current();
  if (!place.queue) return;
  ctx.saved_data["queue"] = c10::IValue::make_capsule(c10::make_intrusive<RememberedPlace>(std::move(place)));
}

/// In backward(): the place for the gradients of these weights, if every one of them may wait; an empty one if not.
template <class... Weights>
WeightGradientQueue::Place queue_for(const torch::autograd::AutogradContext& ctx, const Weights&... weights) {
  const auto found = ctx.saved_data.find("queue");
  if (found == ctx.saved_data.end()) return {};
  const auto capsule = found->second.toCapsule();
  const auto& place = static_cast<const RememberedPlace&>(*capsule).place;
  return (place.queue->defers(weights) && ...) ? place : WeightGradientQueue::Place();
}

}  // namespace phalanx::kernels
