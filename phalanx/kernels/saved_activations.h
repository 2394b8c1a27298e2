// What a checkpointed layer does not compute twice.
//
// Activation checkpointing runs a layer in the forward pass and again in the backward pass (parallel/
// activation_checkpoint.h). Operations that take long for the memory of their outputs may keep these from the first
// run; in the second they are taken instead of computed, and only the graph is built anew.
//
//   SavedActivations saved([](SavedOp op, int nth) { return op == SavedOp::attention; });
//   { const SavedActivations::Scope scope(&kept, SavedActivations::Run::forward); layer(x); }
//   { const SavedActivations::Scope scope(&kept, SavedActivations::Run::recompute); layer(x); }  // the same, in this order
//
// Contract: both runs are on one input, each by one thread; nobody writes to a kept output in place. Which thread is in
// which run is known to that thread alone, for as long as the scope lives. Linear layers of any type, under autocast
// too, attention on the CPU where it is causal over whole sequences (by our own kernel in fp32, by libtorch's in 16
// bits): all else is computed again.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

namespace phalanx::kernels {

enum class SavedOp { linear, attention };
/// Whether the nth operation of its kind in the layer, from 0, keeps its outputs.
using CheckpointPolicy = std::function<bool(SavedOp op, int nth)>;

class SavedActivations {
 public:
  enum class Run { forward, recompute };
  explicit SavedActivations(CheckpointPolicy policy) : policy_(std::move(policy)) {}

  /// Null: nothing that runs inside is kept, or taken, for whatever is around it.
  class [[nodiscard]] Scope {
   public:
    Scope(SavedActivations* saved, Run run);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    SavedActivations *before_, *saved_;
  };

  /// Those of the scope around; null if there is none.
  static SavedActivations* current() noexcept;

  /// compute(), which returns the outputs; or what it returned in the first run.
  template <class Compute>
  std::vector<at::Tensor> once(SavedOp op, Compute&& compute) {
    const bool keeps = policy_(op, counts_[static_cast<std::size_t>(op)]++);
    if (keeps && run_ == Run::recompute) return pop();
    std::vector<at::Tensor> outputs = std::forward<Compute>(compute)();
    if (keeps) save(outputs);
    return outputs;
  }

 private:
  void save(const std::vector<at::Tensor>& outputs);
  std::vector<at::Tensor> pop();

  CheckpointPolicy policy_;
  Run run_ = Run::forward;
  std::array<int, 2> counts_{};
  std::deque<std::vector<at::Tensor>> outputs_;
};

/// compute(), or, in the second run of a layer that keeps it, what it returned in the first.
template <class Compute>
std::vector<at::Tensor> computed_once(SavedOp op, Compute&& compute) {
  SavedActivations* const saved = SavedActivations::current();
  return saved != nullptr ? saved->once(op, std::forward<Compute>(compute)) : std::forward<Compute>(compute)();
}

}  // namespace phalanx::kernels
