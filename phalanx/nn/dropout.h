// Dropout whose mask is a pure function of (seed, step, layer, index), so that it does not depend on the layout.
//
// Ranks, replicas and micro-batches that have some rows of a batch drop what one device with the whole batch drops
// there. A recomputed forward pass (activation checkpointing) drops the same again.
//
//   y = x * (u >= probability) / (1 - probability)        u uniform in [0, 1); in evaluation mode y = x
//
// Before each forward pass of a training step, call set_dropout_rng_state() with the position in the run:
//
//   nn::set_dropout_rng_state(*model, {.seed = 1, .step = step, .first_row = rank * rows_per_rank});
//   model->forward(rows);
//
// A forward pass in training mode without that state throws Error. Rows are the first dimension of x. If ranks hold
// parts of x along some dimension, set_split() says which. Each rank then drops its part of what one rank drops in the
// whole.
#pragma once

#include <optional>
#include <string>

#include "phalanx/nn/module.h"
#include "phalanx/nn/place_in_run.h"

namespace phalanx::nn {

class Dropout : public Module {
 public:
  /// ConfigError unless 0 <= probability < 1.
  explicit Dropout(double probability);

  at::Tensor forward(const at::Tensor& x);  // [rows, ...] -> the same

  void rng_state(std::string layer, const PlaceInRun& rng_state);
  const std::optional<PlaceInRun>& rng_state() const noexcept { return rng_state_; }
  const std::string& layer() const noexcept { return layer_; }
  /// From now on x is one of `parts` equal parts of the activations along `dim` (negative: counted from the last).
  struct SplitOf {
    int dim = 0, part = 0, parts = 1;
  };
  void set_split(const SplitOf& split) { split_ = split; }

 private:
  double probability_;
  std::string layer_;
  std::optional<PlaceInRun> rng_state_;
  SplitOf split_;
};

/// Sets the state of every Dropout in the model. A layer is identified by its name in the model.
void set_dropout_rng_state(torch::nn::Module& model, const PlaceInRun& rng_state);

}  // namespace phalanx::nn
