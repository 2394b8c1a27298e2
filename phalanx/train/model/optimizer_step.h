// OptimizerStep ends a training step: it clips the gradients and steps the optimizer with the learning rate of the
// step. In float16 it also does dynamic loss scaling (optim/loss_scaler.h).
//
//   OptimizerStep optimizer_step(config, model.parameters(), model.grad_norm_group());
//   optimizer_step.scaled(loss).backward();
//   const OptimizerStep::Result result = optimizer_step.apply(step);
//   if (!result.stepped) log::warn("gradients were not finite; no weight was changed");
//
// Where the parameters are on a device, queue() does the same without a wait of the host, and the result is read later:
//
//   const DeviceReadback readback(optimizer_step.queue(step, loss));
//   ...                                                                    // the next step
//   const OptimizerStep::Result result = optimizer_step.result_of(readback.read());
//
// apply() and queue() are collective where parameters are sharded. The result is the same on every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/config.h"
#include "phalanx/observe/trace.h"
#include "phalanx/optim/loss_scaler.h"
#include "phalanx/optim/lr_schedule.h"
#include "phalanx/optim/optimizer.h"
#include "phalanx/optim/weight_average.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx::train {

class ExpertLoad;

class OptimizerStep {
 public:
  /// `parameters`: the trained ones. `grad_norm_group`: the group that sums the gradient norm; null: each rank has all
  /// gradients. `frozen`: names of the model's other parameters, which patterns of
  /// [optimizer] and [muon] may match, too.
  /// `world`: the ranks among which Muon shares its work; null: `grad_norm_group`.
  /// REQUIRES: both groups outlive this object.
  OptimizerStep(const config::TrainConfig& config, const std::vector<NamedTensor>& parameters,
                Communicator* grad_norm_group, const std::vector<std::string>& frozen = {},
                Communicator* world = nullptr);

  double lr_at(std::int64_t step) const { return schedule_.lr_at(step); }
  /// The tensor to call backward() on: the loss, in float16 times the loss scale.
  at::Tensor scaled(const at::Tensor& loss) const { return scaler_ ? scaler_->scaled(loss) : loss; }

  /// 1 without loss scaling. Waits for the device, if the scale is there.
  double loss_scale() const { return scaler_ ? scaler_->scale() : 1.0; }
  /// 0-dim float64 on the device, which queue() changes in place; undefined without loss scaling or on the CPU.
  at::Tensor loss_scale_on_device() const { return scaler_ && is_on_device() ? scaler_->scale_tensor() : at::Tensor(); }

  struct Result {
    bool stepped = true;
    double grad_norm = 0;              // without the loss scale, before clipping
    std::optional<double> loss_scale;  // of this step; only in float16
    std::optional<double> next_loss_scale;
  };
  /// `step` counts from 0. Spans go to `tracing`, which may be null.
  /// ENSURES: the gradients are undefined afterwards. If the norm is not finite, only the loss scale has changed.
  /// Waits for the device.
  Result apply(std::int64_t step, observe::TraceRecorder* tracing = nullptr);

  /// Whether the parameters are on a device other than the CPU.
  bool is_on_device() const { return !device_.is_cpu(); }
  /// As apply(), without a wait. A step whose `loss` (of this rank, 0-dim, on the device) is not finite changes nothing
  /// either. After it, and after a step without loss scaling whose norm is not finite, no further step
  /// changes anything, so that the host may find out later. Returns float64 [kQueued] on the device: the
  /// loss, then what result_of() needs.
  /// REQUIRES: is_on_device().
  at::Tensor queue(std::int64_t step, const at::Tensor& loss, observe::TraceRecorder* tracing = nullptr);
  static constexpr std::int64_t kQueued = 5;
  /// Of these numbers, the loss, and whether the step was taken.
  static double loss_of(const std::vector<double>& numbers) { return numbers[0]; }
  static bool has_stepped(const std::vector<double>& numbers) { return numbers[1] != 0; }
  /// Throws Error where apply() does: the loss scale cannot be lowered any more.
  /// REQUIRES: `numbers` are those of a tensor that queue() has returned.
  Result result_of(const std::vector<double>& numbers) const;

  /// From now on apply() and queue() move the biases of experts, and are collective where there are some. Null: none.
  void set_expert_load(std::shared_ptr<ExpertLoad> load) { expert_load_ = std::move(load); }

  /// Exchanges the parameters' values and their averages, where [ema] keeps some; the next call exchanges them back.
  /// The model must be told that its values have changed. False, and nothing done, without averages.
  bool swap_averages();

  /// Appends the optimizer's state, averages and the loss scale. A run may be resumed in another precision. So the loss
  /// scale is named "layout...", as what depends on the layout of a run; a load that does not want it passes over it.
  void collect_state(TrainState& state) const;

 private:
  std::shared_ptr<Communicator> host_group_;  // of Muon, if parameters are offloaded to the host; else null
  std::unique_ptr<Optimizer> optimizer_;
  std::optional<WeightAverage> average_;
  LearningRateSchedule schedule_;
  std::optional<LossScaler> scaler_;
  at::Device device_;      // of the parameters
  at::Tensor has_failed_;  // 0-dim bool on the device: no step may change anything any more; undefined on the CPU
  double max_norm_;
  Communicator* grad_norm_group_;
  std::shared_ptr<ExpertLoad> expert_load_;
};

}  // namespace phalanx::train
