// The data types that a run computes in and keeps its state in, from [training] dtype and mixed_precision_param, and
// [optimizer] state_dtype.
//
// With dtype = "bfloat16" all of the model except the loss runs in the type in which its weights are kept. Otherwise,
// without sharding the parameters stay float32, and libtorch's autocast converts the operands of matrix products to the
// smaller type. With sharding, units are unsharded in that type from float32 shards, and the whole model except the
// loss runs in it. float16 also uses loss scaling (optimizer_step.h).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "phalanx/config/run_plan.h"

namespace phalanx::train {

/// Of the weights, and of the optimizer's moments.
c10::ScalarType weights_dtype(const config::TrainConfig& config);
c10::ScalarType moments_dtype(const config::TrainConfig& config);

/// The type to which autocast converts the operands of matrix products; unset: no autocast.
std::optional<c10::ScalarType> autocast_dtype(const config::TrainConfig& config, const config::RunPlan& plan);

/// For FullyShardOptions; unset: the parameters' own type.
std::optional<c10::ScalarType> sharded_param_dtype(const config::TrainConfig& config);
c10::ScalarType sharded_reduce_dtype(const config::TrainConfig& config);

/// Whether gradients are in float16, so that the loss is scaled.
bool scales_loss(const config::TrainConfig& config);

/// For the lines at the start of a run.
std::string precision_text(const config::TrainConfig& config, const config::RunPlan& plan);

/// Of this process, for products on GPUs, whatever TORCH_ALLOW_TF32_CUBLAS_OVERRIDE says. Those on the CPU stay in
/// float32.
void set_float32_matmul_precision(const config::TrainConfig& config, c10::Device device);

/// Warns if the processor has no instructions for the type, so that it is slower than float32, and where a GPU computes
/// all products in float32.
void warn_of_slow_precision(const config::TrainConfig& config, c10::Device device);

}  // namespace phalanx::train
