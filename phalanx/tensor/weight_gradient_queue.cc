#include "phalanx/tensor/weight_gradient_queue.h"

#include <utility>

#include "phalanx/tensor/grad_ready.h"

namespace phalanx {
namespace {

thread_local const WeightGradientQueue::Ref* current_ref = nullptr;

}  // namespace

WeightGradientQueue::Scope::Scope(Ref ref) : ref_(std::move(ref)), before_(std::exchange(current_ref, &ref_)) {}

WeightGradientQueue::Scope::~Scope() { current_ref = before_; }

WeightGradientQueue::Ref WeightGradientQueue::current() { return current_ref != nullptr ? *current_ref : Ref(); }

WeightGradientQueue::~WeightGradientQueue() {
  while (!deferred_.empty()) drop(deferred_.begin()->first);
}

bool WeightGradientQueue::defers(const at::Tensor& weight) const {
  return deferring_ && weight.requires_grad() && weight.is_leaf() && is_only_accumulated(weight);
}

void WeightGradientQueue::put(Key key, const at::Tensor& weight, Write write) {
  expect_gradient(weight);
  deferred_[key].push_back({weight, std::move(write)});
}

void WeightGradientQueue::flush(Key key) {
  const auto found = deferred_.find(key);
  if (found == deferred_.end()) return;
  std::vector<DeferredGradient> all = std::move(found->second);
  deferred_.erase(found);
  std::size_t computed = 0;
  try {
    for (; computed < all.size(); ++computed) {
      // Its tensors are freed before the next gradient is computed.
      add_weight_gradient(all[computed].weight, std::exchange(all[computed].write, nullptr));
      expected_gradient_came(all[computed].weight);
    }
  } catch (...) {
    for (; computed < all.size(); ++computed) expected_gradient_came(all[computed].weight, /*came=*/false);
    throw;
  }
}

void WeightGradientQueue::drop(Key key) {
  const auto found = deferred_.find(key);
  if (found == deferred_.end()) return;
  const std::vector<DeferredGradient> all = std::move(found->second);
  deferred_.erase(found);
  for (const auto& one : all) expected_gradient_came(one.weight, /*came=*/false);
}

std::size_t WeightGradientQueue::size(Key key) const {
  const auto found = deferred_.find(key);
  return found == deferred_.end() ? 0 : found->second.size();
}

}  // namespace phalanx
