// The one event grad_ready(parameter): a backward pass has finished accumulating into parameter.grad().
//
// Everything that acts on finished gradients (data parallelism, sharding, an optimizer inside backward) listens to
// this event and to nothing else, so that it does not matter who produced the gradient. It is fired
// - by autograd, once per backward pass and parameter, after all uses of the parameter have been added up;
// - by fire_grad_ready(), from whoever computes a weight gradient outside autograd (a queue of deferred gradients).
//
// Who listens may also say where the gradient shall lie (set_grad_buffer): our own layers then add their part there
// themselves (weight_gradient.h), which saves a tensor and a pass over it; what autograd brings, the listener moves.
// While there is no gradient the buffer is free, and a layer that computes its gradient ahead of the backward pass may
// borrow it; whoever else writes to it takes it back first.
//
// Contract
// - Any number of listeners may subscribe to one parameter; they are called in the order of subscription. A hook that
//   somebody else put on the tensor before is kept and runs first.
// - A listener runs on the thread that runs the backward pass (on CUDA an engine thread, on that device's stream) with
//   grad mode as in the backward pass. It may replace parameter.mutable_grad(). What it throws ends the backward pass
//   and reaches the caller of backward(). It must carry its state in captures: thread-locals are not set there.
// - torch::autograd::grad() does not accumulate and so does not fire the event. Neither does a backward pass that
//   reaches the parameter with an undefined gradient (a layer that defers its weight gradient): it brought nothing,
//   unless mark_grad_arrived() has said otherwise.
// - Every backward pass fires, also the early micro-batches of an accumulation: it is the listener who knows which one
//   is the last (see DistributedDataParallel::no_sync). A pipeline, which knows it too, holds the event back
//   (GradReadyHold), and fires it when it is through with the parameter.
// - While a gradient is still to come from outside autograd (expect_gradient()), autograd does not fire: the event
//   comes with the last such gradient.
// - Subscribing and unsubscribing must not run beside a backward pass; a listener may end its own subscription.
//
//   GradReadySubscription s = on_grad_ready(weight, [&](const at::Tensor& w) { reduce(w.grad()); });
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace phalanx {

using GradReadyListener = std::function<void(const at::Tensor& parameter)>;

/// Ends the subscription when destroyed. Keeps the parameter alive.
class [[nodiscard]] GradReadySubscription {
 public:
  struct Registry;
  GradReadySubscription() = default;
  GradReadySubscription(std::shared_ptr<Registry> registry, std::shared_ptr<GradReadyListener> listener,
                        std::shared_ptr<void> node);
  GradReadySubscription(GradReadySubscription&&) noexcept = default;
  GradReadySubscription& operator=(GradReadySubscription&& other) noexcept;
  ~GradReadySubscription();

 private:
  std::shared_ptr<Registry> registry_;
  std::shared_ptr<GradReadyListener> listener_;
  std::shared_ptr<void> node_;  // autograd's accumulating node of the parameter
};

/// The parameter must be a leaf that requires grad.
GradReadySubscription on_grad_ready(const at::Tensor& parameter, GradReadyListener listener);

/// For a parameter that does not require grad: called with the first gradient that it gets all the same, because it was
/// unfrozen later, by whichever way a gradient comes. What it throws ends that backward pass.
GradReadySubscription on_unexpected_gradient(const at::Tensor& parameter, GradReadyListener listener);

/// How many listeners it has.
std::size_t grad_ready_listeners(const at::Tensor& parameter);

/// Calls the parameter's listeners now; nothing if there are none. Not held back by anything.
void fire_grad_ready(const at::Tensor& parameter);

/// For whoever computes gradients of the parameter later, outside autograd: one call of the first for each gradient to
/// come, and one of the second when it has come, with whether it did: the last one fires the event, unless it is held.
/// Nothing where nobody listens.
void expect_gradient(const at::Tensor& parameter);
void expected_gradient_came(const at::Tensor& parameter, bool came = true);
bool is_gradient_expected(const at::Tensor& parameter);

/// While one is alive, neither autograd nor an expected gradient fires the parameter's event, and it is not made up for
/// afterwards: the owner fires it. Holds those parameters that somebody listens to by now.
class [[nodiscard]] GradReadyHold {
 public:
  explicit GradReadyHold(const std::vector<at::Tensor>& parameters);
  GradReadyHold(const GradReadyHold&) = delete;
  GradReadyHold& operator=(const GradReadyHold&) = delete;
  ~GradReadyHold();

 private:
  std::vector<std::shared_ptr<GradReadySubscription::Registry>> held_;
};

/// Where the gradient of a parameter with listeners is to lie: a tensor of its shape, dtype and device, whose contents
/// count only while parameter.grad() is this very tensor. An undefined tensor takes the offer back. The buffer before
/// is reclaimed: it is not used any more. The buffer may be without memory at times (has_memory()): it is then passed
/// over, and whoever takes its memory away reclaims it first.
void set_grad_buffer(const at::Tensor& parameter, at::Tensor buffer);
/// Whether the tensor's storage has bytes behind it, or needs none.
bool has_memory(const at::Tensor& tensor);
/// Undefined if there is none.
at::Tensor grad_buffer(const at::Tensor& parameter);

/// Room for a gradient that is computed before its backward pass: the result points to the buffer, until somebody else
/// needs that; then to a new tensor with what lay in it. Null if none is offered, it is lent already, or
/// parameter.grad() is defined. Dropping the pointer gives it back.
std::shared_ptr<at::Tensor> borrow_grad_buffer(const at::Tensor& parameter);
/// To be called before anybody but the borrower writes to the buffer.
void reclaim_grad_buffer(const at::Tensor& parameter);

/// For a backward function that has added to parameter.grad() itself and returns an undefined gradient: the event fires
/// all the same, when autograd is through with the parameter.
void mark_grad_arrived(const at::Tensor& parameter);

}  // namespace phalanx
