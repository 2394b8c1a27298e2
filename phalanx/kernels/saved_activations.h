// SavedActivations: outputs that a checkpointed layer saves so that it need not recompute them.
//
// Activation checkpointing runs a layer in the forward pass and again in the backward pass
// (parallel/activation_checkpoint.h). An operation that takes long relative to the memory of its outputs may save them
// in the first run. The second run uses the saved outputs instead of computing them, and only rebuilds the graph.
//
//   SavedActivations saved([](SavedOp op, int nth) { return op == SavedOp::attention; });
//   {
//     const SavedActivations::Scope scope(&saved, SavedActivations::Run::forward);
//     layer(x);
//   }
//   {
//     const SavedActivations::Scope scope(&saved, SavedActivations::Run::recompute);
//     layer(x);                                                  // the same operations, in the same order
//   }
//
// Contract
// - Both runs have the same input, each on one thread. Nothing writes to a saved output in place.
// - A run is known only to the thread that opened its scope, for as long as the scope lives.
// - It covers linear layers of any type, under autocast, too, and causal attention, also of a part of the positions and
//   over a ring of ranks. Several weights that are one product are one linear layer. All else is recomputed, and on a
//   device memory-efficient attention, of float32 (saved_attention.h).
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
/// Whether the nth operation of its kind in the layer, counted from 0, saves its outputs.
using CheckpointPolicy = std::function<bool(SavedOp op, int nth)>;

class SavedActivations {
 public:
  enum class Run { forward, recompute };
  explicit SavedActivations(CheckpointPolicy policy) : policy_(std::move(policy)) {}

  /// With null, nothing inside is saved to or taken from a surrounding scope.
  class [[nodiscard]] Scope {
   public:
    Scope(SavedActivations* saved, Run run);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    SavedActivations *before_, *saved_;
  };

  /// The SavedActivations of the surrounding scope; null if there is none.
  static SavedActivations* current() noexcept;

  /// Returns compute()'s outputs, or, in the second run of a saved operation, those of the first run.
  template <class Compute>
  std::vector<at::Tensor> once(SavedOp op, Compute&& compute) {
    const bool keeps = policy_(op, counts_[static_cast<std::size_t>(op)]++);
    if (keeps && run_ == Run::recompute) return pop(op);
    std::vector<at::Tensor> outputs = std::forward<Compute>(compute)();
    if (keeps) save(op, outputs);
    return outputs;
  }

 private:
  void save(SavedOp op, const std::vector<at::Tensor>& outputs);
  std::vector<at::Tensor> pop(SavedOp op);

  CheckpointPolicy policy_;
  Run run_ = Run::forward;
  std::array<int, 2> counts_{};
  std::deque<std::pair<SavedOp, std::vector<at::Tensor>>> outputs_;
};

/// Returns compute(), or, in the second run of a layer that saves this operation, the outputs of the first run.
template <class Compute>
std::vector<at::Tensor> computed_once(SavedOp op, Compute&& compute) {
  SavedActivations* const saved = SavedActivations::current();
  return saved != nullptr ? saved->once(op, std::forward<Compute>(compute)) : std::forward<Compute>(compute)();
}

}  // namespace phalanx::kernels
