// What a checkpointed layer does not compute twice.
//
// Activation checkpointing runs a layer in the forward pass and again in the backward pass (parallel/
// activation_checkpoint.h). Operations that take long for the memory of their outputs may keep these from the first
// run; in the second they are taken instead of computed, and only the graph is built anew.
//
//   KeptOutputs kept([](KeptOp op, int nth) { return op == KeptOp::attention; });
//   { const KeptOutputs::Scope scope(&kept, KeptOutputs::Run::first); layer(x); }
//   { const KeptOutputs::Scope scope(&kept, KeptOutputs::Run::second); layer(x); }  // the same, in this order
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

enum class KeptOp { linear, attention };
/// Whether the nth operation of its kind in the layer, from 0, keeps its outputs.
using KeepPolicy = std::function<bool(KeptOp op, int nth)>;

class KeptOutputs {
 public:
  enum class Run { first, second };
  explicit KeptOutputs(KeepPolicy policy) : policy_(std::move(policy)) {}

  /// Null: nothing that runs inside is kept, or taken, for whatever is around it.
  class [[nodiscard]] Scope {
   public:
    Scope(KeptOutputs* kept, Run run);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    KeptOutputs *before_, *kept_;
  };

  /// Those of the scope around; null if there is none.
  static KeptOutputs* current() noexcept;

  /// compute(), which returns the outputs; or what it returned in the first run.
  template <class Compute>
  std::vector<at::Tensor> once(KeptOp op, Compute&& compute) {
    const bool keeps = policy_(op, counts_[static_cast<std::size_t>(op)]++);
    if (keeps && run_ == Run::second) return take();
    std::vector<at::Tensor> outputs = std::forward<Compute>(compute)();
    if (keeps) keep(outputs);
    return outputs;
  }

 private:
  void keep(const std::vector<at::Tensor>& outputs);
  std::vector<at::Tensor> take();

  KeepPolicy policy_;
  Run run_ = Run::first;
  std::array<int, 2> counts_{};
  std::deque<std::vector<at::Tensor>> outputs_;
};

/// compute(), or, in the second run of a layer that keeps it, what it returned in the first.
template <class Compute>
std::vector<at::Tensor> computed_once(KeptOp op, Compute&& compute) {
  KeptOutputs* const kept = KeptOutputs::current();
  return kept != nullptr ? kept->once(op, std::forward<Compute>(compute)) : std::forward<Compute>(compute)();
}

}  // namespace phalanx::kernels
