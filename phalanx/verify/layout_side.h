// One of the two runs that a layout check holds beside each other: a model with its optimizer and data, laid out
// somehow.
//
//   LayoutSide side(config, world, device);            // collective; with its starting values
//   const double loss = side.forward_backward(step);     // of this rank's rows
//   side.optimizer_step->apply(step);
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/models/llama.h"
#include "phalanx/train/forward_backward_step.h"
#include "phalanx/train/training_data.h"

namespace phalanx::train {

struct LayoutSide {
  LayoutSide(const TrainConfig& config, const std::shared_ptr<Communicator>& world, at::Device device);

  /// From here on every pass is that of a model whose weights are all of this type, copies of `model`'s; their
  /// gradients are summed over micro-batches in float32. What a sharded layout computes, by other means. One rank only.
  void compute_in(const TrainConfig& config, at::ScalarType dtype);
  /// What the passes go through: of `model`, or the copy in another type.
  std::vector<nn::Module*> modules() const;
  /// The mean loss over this rank's rows.
  double forward_backward(std::int64_t step);
  /// The rows of the global batch that this rank's data rank has.
  data::RowRange rows() const;

  void drop_gradients();
  /// The parameter whose gradient is not finite on this rank, the first one; empty: none is.
  std::string first_not_finite() const;
  void scale_loss(double factor);  // times the scale that it has
  /// What rounding to 16 bits alone does to loss and gradients at the weights as they are: how far those that are
  /// there, found with `loss`, are from the same in float32, relative to their size.
  struct Rounding {
    double loss = 0, norm = 0;
    std::vector<double> gradients;  // in the model's order
  };
  Rounding rounding_of_gradients(std::int64_t step, double loss);  // gradients stay

  RunPlan plan;
  TrainingData data;
  std::unique_ptr<ParallelModel> model;
  ForwardBackwardOptions options;
  std::unique_ptr<OptimizerStep> optimizer_step;

 private:
  double forward_backward_in_cast(std::int64_t step);

  std::shared_ptr<models::Llama> cast_;  // the model in another type; null: there is none
};

}  // namespace phalanx::train
