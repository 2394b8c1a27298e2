// One step's gradients: forward and backward passes over this rank's share of the global batch, accumulated, and
// averaged over the ranks by the last of them.
//
//   const GradientPass pass = compute_gradients(model, update, batches, {.plan = plan, .rank = world->rank()}, step);
//   ... parameters' gradients are those of the mean loss over the global batch (in float16 times the loss scale) ...
//
// Collective over the ranks of the model. The loss is on the device: nothing waits for it here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "phalanx/data/batches.h"
#include "phalanx/train/parallel_model.h"
#include "phalanx/train/step_trace.h"
#include "phalanx/train/weight_update.h"

namespace phalanx::train {

struct GradientPassOptions {
  RunPlan plan;
  int rank = 0;  // in the world
  at::Device device = at::kCPU;
  std::optional<at::ScalarType> autocast;
  StepTrace* trace = nullptr;
};

struct GradientPass {
  at::Tensor loss_sum;  // 0-dim, over the accumulated passes of this rank
  double data_seconds = 0;
};

/// `step` counts from 0.
GradientPass compute_gradients(ParallelModel& model, const WeightUpdate& update, const data::Batches& batches,
                               const GradientPassOptions& options, std::int64_t step);

}  // namespace phalanx::train
