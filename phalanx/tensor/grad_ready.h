// The event grad_ready(parameter): a backward pass has finished accumulating into parameter.grad().
//
// Everything that acts on finished gradients (data parallelism, sharding, an optimizer inside backward) listens to this
// event and to nothing else. So it does not matter which code produced the gradient. It is fired
// - by autograd, once per backward pass and parameter, after all uses of the parameter have been added up;
// - by fire_grad_ready(), from code that computes a weight gradient outside autograd (a queue of deferred gradients).
//
// A listener may also offer a buffer for the gradient (set_grad_buffer). Phalanx layers then add their part directly to
// the buffer (weight_gradient.h), which saves a tensor and a pass over it. A gradient that autograd brings is moved by
// the listener. While there is no gradient the buffer is free, and a layer that computes its gradient ahead of the
// backward pass may borrow it. Other code that writes to the buffer must reclaim it first.
//
// Contract
// - Any number of listeners may subscribe to one parameter. They are called in the order of subscription. A hook that
//   other code put on the tensor before is kept and runs first.
// - A listener runs on the thread that runs the backward pass (on CUDA an engine thread, on that device's stream), with
//   grad mode as in the backward pass. It may replace parameter.mutable_grad(). What it throws ends the backward pass
//   and reaches the caller of backward(). It must carry its state in captures: thread-locals are not set there.
// - torch::autograd::grad() does not accumulate and so does not fire the event. Neither does a backward pass that
//   reaches the parameter with an undefined gradient (a layer that defers its weight gradient), unless
//   mark_grad_arrived() has been called.
// - Every backward pass fires, including the early micro-batches of an accumulation. The listener has to know which one
//   is the last (see DistributedDataParallel::no_sync). A pipeline, which knows it too, holds the event back
//   (GradReadyHold) and fires it when it is done with the parameter.
// - While a gradient is still to come from outside autograd (expect_gradient()), autograd does not fire: the last such
//   gradient fires the event.
// - Subscribing and unsubscribing must not run concurrently with a backward pass. A listener may end its own
//   subscription.
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

/// REQUIRES: the parameter is a leaf that requires grad.
GradReadySubscription on_grad_ready(const at::Tensor& parameter, GradReadyListener listener);

/// For a parameter that does not require grad. The listener is called with the first gradient that the parameter gets
/// anyway, because it was unfrozen later, in whichever way the gradient comes. What it throws ends that backward pass.
GradReadySubscription on_unexpected_gradient(const at::Tensor& parameter, GradReadyListener listener);

/// The parameter's number of listeners.
std::size_t grad_ready_listeners(const at::Tensor& parameter);

/// Calls the parameter's listeners now. Does nothing if there are none. No hold delays it.
void fire_grad_ready(const at::Tensor& parameter);

/// For code that computes gradients of the parameter later, outside autograd. Call expect_gradient() once for each
/// gradient to come, and expected_gradient_came() when it has come; `came` says whether it did. The last call fires the
/// event, unless it is held. Does nothing if there are no listeners.
void expect_gradient(const at::Tensor& parameter);
void expected_gradient_came(const at::Tensor& parameter, bool came = true);
bool is_gradient_expected(const at::Tensor& parameter);

/// While a GradReadyHold is alive, neither autograd nor an expected gradient fires the parameter's event. The event is
/// not fired later either: the owner fires it. Only parameters that already have listeners are held.
class [[nodiscard]] GradReadyHold {
 public:
  explicit GradReadyHold(const std::vector<at::Tensor>& parameters);
  GradReadyHold(const GradReadyHold&) = delete;
  GradReadyHold& operator=(const GradReadyHold&) = delete;
  ~GradReadyHold();

 private:
  std::vector<std::shared_ptr<GradReadySubscription::Registry>> held_;
};

/// Offers `buffer` for the gradient of a parameter with listeners. Its contents count only while parameter.grad() is
/// this very tensor. An undefined tensor withdraws the offer. The previous buffer is reclaimed: it is not used any
/// more. The buffer may be without memory at times (has_memory()) and is then skipped. Code that takes its memory away
/// must reclaim it first.
/// REQUIRES: `buffer` has the parameter's shape, dtype and device.
void set_grad_buffer(const at::Tensor& parameter, at::Tensor buffer);
/// Whether the tensor's storage has bytes behind it, or needs none.
bool has_memory(const at::Tensor& tensor);
/// Undefined if there is none.
at::Tensor grad_buffer(const at::Tensor& parameter);

/// Borrows the buffer for a gradient that is computed before its backward pass. The result points to the buffer until
/// other code needs that; then it points to a new tensor with the buffer's contents. Returns null if no buffer is
/// offered, it is already borrowed, or parameter.grad() is defined. Dropping the pointer returns the buffer.
std::shared_ptr<at::Tensor> borrow_grad_buffer(const at::Tensor& parameter);
/// Must be called before code other than the borrower writes to the buffer.
void reclaim_grad_buffer(const at::Tensor& parameter);

/// For a backward function that has added to parameter.grad() itself and returns an undefined gradient. The event fires
/// anyway, when autograd is done with the parameter.
void mark_grad_arrived(const at::Tensor& parameter);

}  // namespace phalanx
