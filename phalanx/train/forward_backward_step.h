// Computes the gradients of one step: forward and backward passes over this rank's share of the global batch. Gradients
// are accumulated over the passes; the last pass sums them over the ranks.
//
// The loss of a step is the sum of the losses of all tokens that have a label, divided by the number of these tokens in
// the global batch, whatever share of them each rank and micro-batch has. The number is a function of the step, so that
// every rank knows it without asking the others.
//
//   const ForwardBackwardResult result =
//       forward_backward_step(model, optimizer_step, dataloader, {.plan = plan, .rank = world->rank()}, step);
//   // Now the parameters' gradients are those of the loss of the global batch (float16: times the loss scale).
//
// Collective over the ranks of the model. The loss stays on the device: this function does not wait for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "phalanx/data/data_loader.h"
#include "phalanx/train/model/optimizer_step.h"
#include "phalanx/train/model/parallel_model.h"
#include "phalanx/train/profiling/profiler.h"

namespace phalanx::train {

struct ForwardBackwardOptions {
  config::RunPlan plan;
  int rank = 0;  // in the world
  at::Device device = at::kCPU;
  std::optional<at::ScalarType> autocast;
  Profiler* profiler = nullptr;
  at::Tensor reference = {};  // of the file's pairs of preferences; undefined: there are none
};

struct ForwardBackwardResult {
  at::Tensor loss;               // 0-dim, this rank's part of the loss: the ranks' sum is that of the global batch
  std::int64_t label_count = 0;  // tokens of this rank that have a label, or pairs (TokenBatch::label_count)
  std::int64_t global_label_count = 0;  // of the global batch
  double pairs = 0;                     // of this rank's tokens that share a document: what attention computes
  double data_seconds = 0;
  at::Tensor preference_sums;  // PreferenceLoss::take_sums()
};

/// `step` counts from 0.
ForwardBackwardResult forward_backward_step(ParallelModel& model, const OptimizerStep& optimizer_step,
                                            const data::BatchSource& dataloader, const ForwardBackwardOptions& options,
                                            std::int64_t step);

}  // namespace phalanx::train
