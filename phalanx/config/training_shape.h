// What of a configuration decides how much memory a run takes: plan/memory_model.h's input. Knows no tensor.
//
//   const plan::TrainingShape shape = training_shape(config, plan_run(config, 8));
//   plan::predict_memory(shape);
//
// Of where the run is (device, transport, threads) it knows nothing: train/run_memory.h adds that.
#pragma once

#include "phalanx/config/run_plan.h"
#include "phalanx/plan/layout.h"

namespace phalanx::train {

/// What all layouts of a run have in common: model, sequence, optimizer, types.
plan::TrainingShape shape_without_layout(const TrainConfig& config);

plan::Layout layout_of(const TrainConfig& config, const RunPlan& plan);

plan::TrainingShape training_shape(const TrainConfig& config, const RunPlan& plan);

}  // namespace phalanx::train
