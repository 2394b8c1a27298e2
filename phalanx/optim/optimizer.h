// Optimizer: turns gradients into an update. AdamW and SGD derive from it.
//
// Contract
// - Parameters are given with their fully qualified names; state is named by them ("optimizer.<fqn>.exp_avg"), never by
//   an index, so that a checkpoint survives a change of order. A name or a tensor given twice is an Error.
// - All state tensors exist from construction on: loading a checkpoint fills them in place, before or after steps.
// - step(lr) updates every parameter whose gradient is defined; the others, and their state, stay as they are.
// - The arithmetic is element by element: ranks that hold the same bits before a step hold the same bits after it.
//
//   AdamW optimizer(parameters_of(*model), {.weight_decay = 0.1});
//   loss.backward();
//   clip_grad_norm(optimizer.parameters(), 1.0);
//   optimizer.step(schedule.lr_at(step));
//   optimizer.zero_grad();
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "phalanx/tensor/named.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx {

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  virtual void step(double lr) = 0;
  /// Appends handles to the state under "optimizer.<fqn>.<what>".
  virtual void collect_state(TrainState& state) const = 0;

  /// Makes every gradient undefined: the next backward writes it instead of adding to zeros.
  void zero_grad();
  const std::vector<NamedTensor>& parameters() const noexcept { return parameters_; }

 protected:
  /// Throws on an empty list, an undefined or integer tensor, and on names or tensors given twice.
  explicit Optimizer(std::vector<NamedTensor> parameters);

  /// One tensor of zeros like each parameter, in its memory layout.
  std::vector<at::Tensor> zeros_like_parameters() const;
  static void collect(TrainState& state, const std::vector<NamedTensor>& parameters,
                      const std::vector<at::Tensor>& tensors, const std::string& what);

  std::vector<NamedTensor> parameters_;
};

}  // namespace phalanx
