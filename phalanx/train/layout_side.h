// One of the two runs that a layout check holds beside each other: a model with its optimizer and data, laid out
// somehow.
//
//   LayoutSide side(config, world, device);            // collective; with its starting values
//   const double loss = side.find_gradients(step);     // of this rank's rows
//   side.update->apply(step);
#pragma once

#include <cstdint>
#include <memory>

#include "phalanx/train/gradient_pass.h"
#include "phalanx/train/training_data.h"

namespace phalanx::train {

struct LayoutSide {
  LayoutSide(const TrainConfig& config, const std::shared_ptr<Communicator>& world, at::Device device);

  /// The mean loss over this rank's rows.
  double find_gradients(std::int64_t step);
  /// The rows of the global batch that this rank's data rank has.
  data::RowRange rows() const;

  RunPlan plan;
  TrainingData data;
  ParallelModel model;
  GradientPassOptions options;
  std::unique_ptr<WeightUpdate> update;
};

}  // namespace phalanx::train
