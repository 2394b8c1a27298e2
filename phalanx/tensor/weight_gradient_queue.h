// WeightGradientQueue: defers weight gradients until after the backward pass, which does not need them.
//
// The previous pipeline stage waits for the gradient of a layer's input; the gradient of its weight can wait.
// Zero-bubble pipeline schedules use this to fill the gaps: they run I (backward_input) of a micro-batch and its W
// (backward_weight) some time later.
//
//   const auto queue = std::make_shared<WeightGradientQueue>();
//   at::Tensor loss;
//   {
//     const WeightGradientQueue::Scope scope(queue, {.stage = 0, .micro_batch = 3});
//     loss = model.loss(x, y);
//   }
//   loss.backward();                                  // I: Phalanx layers leave their weight gradients in the queue
//   queue->flush({.stage = 0, .micro_batch = 3});     // W: now parameters have their gradients
//
// Layers that defer: kernels::linear (weight and bias), swiglu_feed_forward, linear_cross_entropy and embedding. All
// other gradients, including those of norms and of foreign layers, come in the backward pass as usual.
//
// Contract
// - A layer stores in its forward pass which scope it ran in, whatever thread then runs its backward pass. checkpoint()
//   stores the scope for the layers that it reruns.
// - flush() computes the gradients in the order in which the backward pass left them, with the formula that the layer
//   uses otherwise, and adds them up as autograd would. So the bits are the same. Keys are independent of each other.
// - grad_ready (grad_ready.h) of a parameter fires when the last gradient that a backward pass left in a queue for it
//   has been computed, and not before.
// - Nothing is deferred if autograd has to see the gradient (autograd::grad(), backward(inputs = ...), create_graph,
//   hooks on the weight), or after set_deferring(false), until it is set again.
// - The queue keeps the inputs and output gradients that it needs, each until it has been used. drop() frees a key that
//   will not be flushed.
// - For one thread at a time: the thread that runs forward and backward passes. On CUDA it waits for the engine's
//   thread.
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
    // NOLINTNEXTLINE(modernize-use-nullptr): takes the 0 that the generated comparison holds for a pointer
    auto operator<=>(const Key&) const = default;
  };
  /// What a layer stores; empty if it ran in no scope.
  struct Ref {
    std::shared_ptr<WeightGradientQueue> queue;
    Key key;
  };

  /// While it is open, layers whose forward pass runs on this thread leave their weight gradients in the queue.
  class [[nodiscard]] Scope {
   public:
    Scope(std::shared_ptr<WeightGradientQueue> queue, Key key) : Scope(Ref{std::move(queue), key}) {}
    explicit Scope(Ref ref);  // an empty Ref: as if there were no surrounding scope
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

  /// Whether backward passes from now on leave their weight gradients here. True at first.
  void set_deferring(bool deferring) noexcept { deferring_ = deferring; }

  /// Computes the gradients that the key's backward passes left, and frees them. Does nothing if there are none. If a
  /// gradient cannot be computed, the key's others are dropped and the error reaches the caller.
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
