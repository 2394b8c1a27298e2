// The types that a run computes in, from [training] mixed_precision_param.
//
// Without sharding parameters stay float32 and libtorch's autocast brings the operands of matrix products to the
// smaller type. Under sharding units are gathered in that type, from float32 shards, and all of the model runs in it
// but for the loss. float16 comes with loss scaling (optimizer_step.h).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "phalanx/config/run_plan.h"

namespace phalanx::train {

/// What autocast brings the operands of matrix products to; nothing: no autocast.
std::optional<c10::ScalarType> autocast_dtype(const TrainConfig& config, const RunPlan& plan);

/// For FullyShardOptions; nothing: as the parameters are.
std::optional<c10::ScalarType> sharded_param_dtype(const TrainConfig& config);
c10::ScalarType sharded_reduce_dtype(const TrainConfig& config);

/// Gradients in float16: their loss is scaled.
bool scales_loss(const TrainConfig& config);

/// For the lines at the start of a run.
std::string precision_text(const TrainConfig& config, const RunPlan& plan);

/// Where the processor has no instructions for the type, so that it is slower than float32.
void warn_of_slow_precision(const TrainConfig& config, c10::Device device);

}  // namespace phalanx::train
