// The part of a configuration that decides how much memory a run needs: the input of plan/memory_model.h. It does not
// use torch.
//
//   const plan::TrainingShape shape = training_shape(config, plan_run(config, 8));
//   plan::predict_memory(shape);
//
// It does not know where the run takes place (device, transport, threads): train/run_memory.h adds that.
#pragma once

#include <cstdint>

#include "phalanx/config/run_plan.h"
#include "phalanx/plan/layout.h"

namespace phalanx::config {

/// What all layouts of a run share: model, sequence length, optimizer, types.
plan::TrainingShape shape_without_layout(const TrainConfig& config);

/// How many numbers the optimizer keeps of each trained parameter, averages of weights and masters included.
/// `matrices`: of those that Muon steps, if it does. `narrow`: of all these, those of 16 bits; the others are float32.
struct OptimizerCopies {
  std::int64_t others = 0, matrices = 0, narrow = 0;
  std::int64_t bytes(bool is_matrix) const { return 4 * (is_matrix ? matrices : others) - 2 * narrow; }
};
OptimizerCopies optimizer_copies(const TrainConfig& config);

plan::Layout layout_of(const TrainConfig& config, const RunPlan& plan);

plan::TrainingShape training_shape(const TrainConfig& config, const RunPlan& plan);

}  // namespace phalanx::config
