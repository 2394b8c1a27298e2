// WeightGradientQueue: weight gradients that are computed later than the backward pass that needs nothing of them.
//
// The gradient of a layer's input is what the stage before waits for; that of its weight can wait. Zero-bubble pipeline
// schedules use it to fill the gaps: they run I, the input gradients of a micro-batch, and its W some time later.
//
//   const auto queue = std::make_shared<WeightGradientQueue>();
//   at::Tensor loss;
//   { const WeightGradientQueue::Scope scope(queue, {.stage = 0, .micro_batch = 3}); loss = model.loss(x, y); }
//   loss.backward();                                      // I: our layers leave their weight gradients in the queue
//   queue->flush({.stage = 0, .micro_batch = 3});         // W: now parameters have their gradients
//
// Which layers: kernels::linear (weight and bias), swiglu_feed_forward, linear_cross_entropy and embedding. All other
// gradients, those of norms and of other people's layers among them, come in the backward pass as ever.
//
// Contract
// - A layer remembers in its forward pass which scope it ran in, on whatever thread its backward pass then runs.
//   checkpoint() remembers it for the layers that it runs again.
// - flush() computes the gradients in the order in which the backward pass left them, with the formula that the layer
//   uses otherwise, and adds them up as autograd would, so the bits are the same; keys are independent of each other.
// - grad_ready (grad_ready.h) of a parameter comes when the last gradient that a backward pass left in a queue for it
//   has been computed, and not before.
// - Where autograd has to see the gradient (autograd::grad(), backward(inputs = ...), create_graph, hooks on the
//   weight) nothing is deferred; nor after set_deferring(false), until it is set again.
// - The queue keeps what it needs: inputs and output gradients, each until it has been used. drop() lets go of a key
//   that will not be flushed.
// - One thread at a time: the one that runs forward and backward passes, which on CUDA waits for the engine's.
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "phalanx/tensor/weight_gradient.h"

namespace phalanx {

class WeightGradientQueue {
 public:
  struct Key {
    int stage = 0;
    int micro_batch = 0;
    auto operator<=>(const Key&) const = default;
  };
  /// What a layer remembers; empty where it ran in no scope.
  struct Ref {
    std::shared_ptr<WeightGradientQueue> queue;
    Key key;
  };

  /// Layers whose forward pass runs on this thread while it is open leave their weight gradients in the queue.
  class [[nodiscard]] Scope {
   public:
    Scope(std::shared_ptr<WeightGradientQueue> queue, Key key) : Scope(Ref{std::move(queue), key}) {}
    explicit Scope(Ref ref);  // an empty place: as if there was no scope around
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    Ref ref_;
    const Ref* before_;
  };
  static Ref current();

  WeightGradientQueue() = default;
  ~WeightGradientQueue();
  WeightGradientQueue(const WeightGradientQueue&) = delete;
  WeightGradientQueue& operator=(const WeightGradientQueue&) = delete;

  /// Whether backward passes leave their weight gradients here from now on; true at first.
  void set_deferring(bool deferring) noexcept { deferring_ = deferring; }

  /// Computes what the key's backward passes left, and lets go of it; nothing if they left nothing. If a gradient
  /// cannot be computed the key's others are dropped and the error goes on to the caller.
  void flush(Key key);
  void drop(Key key);
  std::size_t size(Key key) const;
  bool is_empty() const noexcept { return deferred_.empty(); }

  // For layers, in their backward function.
  using Write = std::function<void(const WeightGradient&)>;
  bool defers(const at::Tensor& weight) const;
  void put(Key key, const at::Tensor& weight, Write write);

 private:
  struct DeferredGradient {
    at::Tensor weight;
    Write write;
  };
  std::map<Key, std::vector<DeferredGradient>> deferred_;
  bool deferring_ = true;
};

}  // namespace phalanx
