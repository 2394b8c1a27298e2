#include "phalanx/nn/grad_ready.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx {

struct GradReadySubscription::Registry {
  std::vector<std::shared_ptr<GradReadyListener>> listeners;

  void fire(const at::Tensor& parameter) {
    // A copy: a listener may unsubscribe while it runs.
    const auto now = listeners;
    for (const auto& listener : now) (*listener)(parameter);
  }
};

namespace {

// A tensor has room for one such hook, so this one serves all listeners. The registry is found again through it.
struct GradReadyHook final : torch::autograd::PostAccumulateGradHook {
  std::shared_ptr<GradReadySubscription::Registry> registry = std::make_shared<GradReadySubscription::Registry>();
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> earlier;  // somebody else's

  void operator()(const at::Tensor& parameter) override {
    if (earlier) (*earlier)(parameter);
    registry->fire(parameter);
  }
};

GradReadyHook* grad_ready_hook_of(const at::Tensor& parameter) {
  return dynamic_cast<GradReadyHook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
}

}  // namespace

GradReadySubscription::GradReadySubscription(std::shared_ptr<Registry> registry,
                                             std::shared_ptr<GradReadyListener> listener)
    : registry_(std::move(registry)), listener_(std::move(listener)) {}

GradReadySubscription& GradReadySubscription::operator=(GradReadySubscription&& other) noexcept {
  std::swap(registry_, other.registry_);
  std::swap(listener_, other.listener_);
  return *this;
}

GradReadySubscription::~GradReadySubscription() {
  if (registry_) std::erase(registry_->listeners, listener_);
}

GradReadySubscription on_grad_ready(const at::Tensor& parameter, GradReadyListener listener) {
  if (!parameter.defined() || !parameter.requires_grad() || !parameter.is_leaf()) {
    throw Error("on_grad_ready: expected a leaf tensor that requires grad");
  }
  GradReadyHook* hook = grad_ready_hook_of(parameter);
  if (hook == nullptr) {
    auto made = std::make_unique<GradReadyHook>();
    hook = made.get();
    made->earlier = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(made));
  }
  auto shared = std::make_shared<GradReadyListener>(std::move(listener));
  hook->registry->listeners.push_back(shared);
  return {hook->registry, std::move(shared)};
}

void fire_grad_ready(const at::Tensor& parameter) {
  if (const GradReadyHook* hook = grad_ready_hook_of(parameter)) hook->registry->fire(parameter);
}

}  // namespace phalanx
