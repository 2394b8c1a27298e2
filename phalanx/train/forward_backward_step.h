// One step's gradients: forward and backward passes over this rank's share of the global batch, accumulated, and
// averaged over the ranks by the last of them.
//
//   const ForwardBackwardResult pass = forward_backward_step(model, update, batches, {.plan = plan, .rank = world->rank()}, step);
//   ... parameters' gradients are those of the mean loss over the global batch (in float16 times the loss scale) ...
//
// Collective over the ranks of the model. The loss is on the device: nothing waits for it here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "phalanx/data/data_loader.h"
#include "phalanx/train/optimizer_step.h"
#include "phalanx/train/parallel_model.h"
#include "phalanx/train/profiler.h"

namespace phalanx::train {

struct ForwardBackwardOptions {
  RunPlan plan;
  int rank = 0;  // in the world
  at::Device device = at::kCPU;
  std::optional<at::ScalarType> autocast;
  Profiler* profiler = nullptr;
};

struct ForwardBackwardResult {
  at::Tensor loss_sum;  // 0-dim, over the accumulated passes of this rank
  double data_seconds = 0;
};

/// `step` counts from 0.
ForwardBackwardResult forward_backward_step(ParallelModel& model, const OptimizerStep& optimizer_step,
                                            const data::DataLoader& dataloader, const ForwardBackwardOptions& options,
                                            std::int64_t step);

}  // namespace phalanx::train
