#include "phalanx/tensor/grad_ready.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx {

struct GradReadySubscription::Registry {
  std::vector<std::shared_ptr<GradReadyListener>> listeners;
  at::Tensor buffer;
  std::weak_ptr<at::Tensor> borrower;
  bool added = false;      // in the current backward pass, a layer has added to the gradient itself
  bool arrived = false;    // the current backward pass has brought a gradient
  bool is_frozen = false;  // no hook sees what arrives: every gradient was unexpected
  int expected = 0;        // gradients to come from outside autograd
  int holds = 0;

  void fire_unless_held(const at::Tensor& parameter) {
    if (expected == 0 && holds == 0) fire(parameter);
  }

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
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> earlier;  // other code's hook

  void operator()(const at::Tensor& parameter) override {
    if (earlier) (*earlier)(parameter);
    if (std::exchange(registry->arrived, false) || registry->is_frozen) registry->fire_unless_held(parameter);
  }
};

// Autograd calls the hook above even if a node returned no gradient for the parameter: a layer that defers its weight
// gradient, a recomputed block. This hook runs before the accumulation and sees what arrives. It is on the accumulating
// node, because Tensor::register_hook() removes hooks that other code put on the tensor itself.
struct ArrivalHook final : torch::autograd::FunctionPreHook {
  explicit ArrivalHook(std::shared_ptr<GradReadySubscription::Registry> registry) : registry(std::move(registry)) {}
  std::shared_ptr<GradReadySubscription::Registry> registry;

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    registry->arrived = std::exchange(registry->added, false) || grads[0].defined();
    return grads;
  }
};

void watch_arrivals(torch::autograd::Node& node, const std::shared_ptr<GradReadySubscription::Registry>& registry) {
  for (const auto& hook : node.pre_hooks()) {
    const auto* ours = dynamic_cast<const ArrivalHook*>(hook.get());
    if (ours != nullptr && ours->registry == registry) return;
  }
  node.add_pre_hook(std::make_unique<ArrivalHook>(registry));
}

GradReadyHook* grad_ready_hook_of(const at::Tensor& parameter) {
  return dynamic_cast<GradReadyHook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
}

GradReadyHook* ensure_hook(const at::Tensor& parameter) {
  torch::autograd::impl::materialize_autograd_meta(parameter);  // one that never required grad has none
  if (GradReadyHook* hook = grad_ready_hook_of(parameter)) return hook;
  auto made = std::make_unique<GradReadyHook>();
  GradReadyHook* hook = made.get();
  made->earlier = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(made));
  return hook;
}

}  // namespace

GradReadySubscription::GradReadySubscription(std::shared_ptr<Registry> registry,
                                             std::shared_ptr<GradReadyListener> listener, std::shared_ptr<void> node)
    : registry_(std::move(registry)), listener_(std::move(listener)), node_(std::move(node)) {}

GradReadySubscription& GradReadySubscription::operator=(GradReadySubscription&& other) noexcept {
  std::swap(registry_, other.registry_);
  std::swap(listener_, other.listener_);
  std::swap(node_, other.node_);
  return *this;
}

GradReadySubscription::~GradReadySubscription() {
  if (registry_) std::erase(registry_->listeners, listener_);
}

GradReadySubscription on_grad_ready(const at::Tensor& parameter, GradReadyListener listener) {
  if (!parameter.defined() || !parameter.requires_grad() || !parameter.is_leaf()) {
    throw Error("on_grad_ready: expected a leaf tensor that requires grad");
  }
  const GradReadyHook* hook = ensure_hook(parameter);
  // Tensors refer to their accumulating node weakly: without an owner the node, and its hook, would be lost. The
  // registry cannot own it, because the tensor owns the registry and the node owns the tensor. Its pointer type differs
  // between versions of libtorch.
  using NodePointer = decltype(torch::autograd::Edge::function);
  const auto node = std::make_shared<NodePointer>(torch::autograd::impl::grad_accumulator(parameter));
  watch_arrivals(**node, hook->registry);
  hook->registry->is_frozen = false;
  auto shared = std::make_shared<GradReadyListener>(std::move(listener));
  hook->registry->listeners.push_back(shared);
  return {hook->registry, std::move(shared), node};
}

GradReadySubscription on_unexpected_gradient(const at::Tensor& parameter, GradReadyListener listener) {
  if (!parameter.defined() || parameter.requires_grad() || !parameter.is_leaf()) {
    throw Error("on_unexpected_gradient: expected a leaf tensor that does not require grad");
  }
  const GradReadyHook* hook = ensure_hook(parameter);
  hook->registry->is_frozen = true;
  auto shared = std::make_shared<GradReadyListener>(std::move(listener));
  hook->registry->listeners.push_back(shared);
  return {hook->registry, std::move(shared), std::make_shared<at::Tensor>(parameter)};
}

std::size_t grad_ready_listeners(const at::Tensor& parameter) {
  const GradReadyHook* hook = grad_ready_hook_of(parameter);
  return hook == nullptr ? 0 : hook->registry->listeners.size();
}

void fire_grad_ready(const at::Tensor& parameter) {
  if (const GradReadyHook* hook = grad_ready_hook_of(parameter)) hook->registry->fire(parameter);
}

void expect_gradient(const at::Tensor& parameter) {
  if (const GradReadyHook* hook = grad_ready_hook_of(parameter)) ++hook->registry->expected;
}

void expected_gradient_came(const at::Tensor& parameter, bool came) {
  const GradReadyHook* hook = grad_ready_hook_of(parameter);
  if (hook == nullptr || hook->registry->expected == 0) return;  // the listeners came later
  --hook->registry->expected;
  if (came) hook->registry->fire_unless_held(parameter);
}

bool is_gradient_expected(const at::Tensor& parameter) {
  const GradReadyHook* hook = grad_ready_hook_of(parameter);
  return hook != nullptr && hook->registry->expected > 0;
}

GradReadyHold::GradReadyHold(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    const GradReadyHook* hook = grad_ready_hook_of(parameter);
    if (hook == nullptr) continue;
    ++hook->registry->holds;
    held_.push_back(hook->registry);
  }
}

GradReadyHold::~GradReadyHold() {
  for (const auto& registry : held_) --registry->holds;
}

void set_grad_buffer(const at::Tensor& parameter, at::Tensor buffer) {
  GradReadyHook* hook = grad_ready_hook_of(parameter);
  if (hook == nullptr) {
    if (!buffer.defined()) return;
    throw Error("set_grad_buffer: nobody listens to the parameter's grad_ready; subscribe first");
  }
  if (buffer.defined() && (buffer.sizes() != parameter.sizes() || buffer.scalar_type() != parameter.scalar_type() ||
                           buffer.device() != parameter.device())) {
    throw Error(fmt::format("set_grad_buffer: the buffer is {}, the parameter {}; expected the same", buffer.toString(),
                            parameter.toString()));
  }
  reclaim_grad_buffer(parameter);
  hook->registry->buffer = std::move(buffer);
}

bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

at::Tensor grad_buffer(const at::Tensor& parameter) {
  const GradReadyHook* hook = parameter.defined() ? grad_ready_hook_of(parameter) : nullptr;
  return hook == nullptr ? at::Tensor() : hook->registry->buffer;
}

std::shared_ptr<at::Tensor> borrow_grad_buffer(const at::Tensor& parameter) {
  const GradReadyHook* hook = parameter.defined() ? grad_ready_hook_of(parameter) : nullptr;
  if (hook == nullptr) return nullptr;
  GradReadySubscription::Registry& registry = *hook->registry;
  if (!registry.buffer.defined() || parameter.grad().defined() || !registry.borrower.expired()) return nullptr;
  if (!has_memory(registry.buffer)) return nullptr;
  auto borrowed = std::make_shared<at::Tensor>(registry.buffer);
  registry.borrower = borrowed;
  return borrowed;
}

void reclaim_grad_buffer(const at::Tensor& parameter) {
  const GradReadyHook* hook = grad_ready_hook_of(parameter);
  if (hook == nullptr) return;
  if (const auto borrowed = std::exchange(hook->registry->borrower, {}).lock()) *borrowed = borrowed->clone();
}

void mark_grad_arrived(const at::Tensor& parameter) {
  if (const GradReadyHook* hook = grad_ready_hook_of(parameter)) hook->registry->added = true;
}

}  // namespace phalanx
