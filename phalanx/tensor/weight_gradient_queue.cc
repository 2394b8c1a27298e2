#include "phalanx/tensor/weight_gradient_queue.h"

#include <utility>

#include "phalanx/tensor/grad_ready.h"

namespace phalanx {
namespace {

thread_local const WeightGradientQueue::Place* current_place = nullptr;

}  // namespace

WeightGradientQueue::Scope::Scope(Place place)
    : place_(std::move(place)), before_(std::exchange(current_place, &place_)) {}

WeightGradientQueue::Scope::~Scope() { current_place = before_; }

WeightGradientQueue::Place WeightGradientQueue::current() {
  return current_place != nullptr ? *current_place : Place();
}

WeightGradientQueue::~WeightGradientQueue() {
  while (!left_.empty()) drop(left_.begin()->first);
}

bool WeightGradientQueue::defers(const at::Tensor& weight) const {
  return deferring_ && weight.requires_grad() && weight.is_leaf() && is_only_accumulated(weight);
}

void WeightGradientQueue::leave(Key key, const at::Tensor& weight, Write write) {
  expect_gradient(weight);
  left_[key].push_back({weight, std::move(write)});
}

void WeightGradientQueue::flush(Key key) {
  const auto found = left_.find(key);
  if (found == left_.end()) return;
  std::vector<Left> all = std::move(found->second);
  left_.erase(found);
  std::size_t computed = 0;
  try {
    for (; computed < all.size(); ++computed) {
      // Its tensors are let go of before the next is computed.
      add_weight_gradient(all[computed].weight, std::exchange(all[computed].write, nullptr));
      expected_gradient_came(all[computed].weight);
    }
  } catch (...) {
    for (; computed < all.size(); ++computed) expected_gradient_came(all[computed].weight, /*came=*/false);
    throw;
  }
}

void WeightGradientQueue::drop(Key key) {
  const auto found = left_.find(key);
  if (found == left_.end()) return;
  const std::vector<Left> all = std::move(found->second);
  left_.erase(found);
  for (const auto& one : all) expected_gradient_came(one.weight, /*came=*/false);
}

std::size_t WeightGradientQueue::size(Key key) const {
  const auto found = left_.find(key);
  return found == left_.end() ? 0 : found->second.size();
}

}  // namespace phalanx
