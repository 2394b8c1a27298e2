// The end of a training step: gradients are clipped, the optimizer steps with the learning rate of the step; in float16
// with dynamic loss scaling (optim/loss_scaler.h).
//
//   OptimizerStep update(config, model.parameters(), model.grad_norm_group());
//   update.scaled(loss).backward();
//   const auto result = update.apply(step);
//   if (!result.stepped) ...                       // the gradients were not finite; nothing was changed
//
// apply() is collective where parameters are sharded, and its result the same on every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/config.h"
#include "phalanx/observe/trace.h"
#include "phalanx/optim/loss_scaler.h"
#include "phalanx/optim/lr_schedule.h"
#include "phalanx/optim/optimizer.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx::train {

class OptimizerStep {
 public:
  /// `grad_norm_group`: who adds up the gradient norm with this rank; null: each rank has it all. It outlives this.
  OptimizerStep(const TrainConfig& config, std::vector<NamedTensor> parameters, Communicator* grad_norm_group);

  double lr_at(std::int64_t step) const { return schedule_.lr_at(step); }
  /// What backward() is called on: the loss, in float16 times the scale.
  at::Tensor scaled(const at::Tensor& loss) const { return scaler_ ? scaler_->scaled(loss) : loss; }

  /// 1 without one.
  double loss_scale() const { return scaler_ ? scaler_->scale() : 1.0; }

  struct Result {
    bool stepped = true;
    double grad_norm = 0;              // without the scale, before clipping
    std::optional<double> loss_scale;  // of this step; float16 alone has one
    std::optional<double> next_loss_scale;
  };
  /// `step` counts from 0. Gradients are undefined afterwards. Where the norm is not finite nothing else is changed,
  /// but the scale. Spans go to `tracing`, which may be null.
  Result apply(std::int64_t step, observe::TraceRecorder* tracing = nullptr);

  /// The optimizer's state and the scale. A run may continue in another precision: the scale is named as what belongs
  /// to the way a run is laid out is, and passed over where it is not wanted.
  void collect_state(TrainState& state) const;

 private:
  std::unique_ptr<Optimizer> optimizer_;
  LearningRateSchedule schedule_;
  std::optional<LossScaler> scaler_;
  double max_norm_;
  Communicator* grad_norm_group_;
};

}  // namespace phalanx::train
