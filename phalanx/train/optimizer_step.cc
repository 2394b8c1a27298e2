#include "phalanx/train/optimizer_step.h"

#include <limits>

#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/train/precision.h"

namespace phalanx::train {
namespace {

using observe::TraceSpan;

std::unique_ptr<Optimizer> make_optimizer(const TrainConfig::Optimizer& config, std::vector<NamedTensor> parameters) {
  if (config.name == "SGD") {
    return std::make_unique<Sgd>(
        std::move(parameters),
        SgdOptions{.momentum = config.momentum, .weight_decay = config.weight_decay, .no_decay = config.no_decay});
  }
  return std::make_unique<AdamW>(std::move(parameters), AdamWOptions{.beta1 = config.beta1,
                                                                     .beta2 = config.beta2,
                                                                     .eps = config.eps,
                                                                     .weight_decay = config.weight_decay,
                                                                     .no_decay = config.no_decay});
}

LearningRateScheduleOptions schedule_options(const TrainConfig& config) {
  return {.base_lr = config.optimizer.lr,
          .total_steps = config.training.steps,
          .warmup_steps = config.lr_scheduler.warmup_steps,
          .decay_ratio = config.lr_scheduler.decay_ratio,
          .decay_type = learning_rate_decay_from(config.lr_scheduler.decay_type),
          .min_lr_factor = config.lr_scheduler.min_lr_factor};
}

}  // namespace

OptimizerStep::OptimizerStep(const TrainConfig& config, std::vector<NamedTensor> parameters,
                             Communicator* grad_norm_group)
    : optimizer_(make_optimizer(config.optimizer, std::move(parameters))),
      schedule_(schedule_options(config)),
      max_norm_(config.training.max_norm > 0 ? config.training.max_norm : std::numeric_limits<double>::infinity()),
      grad_norm_group_(grad_norm_group) {
  if (scales_loss(config)) {
    scaler_.emplace(LossScalerOptions{.initial_scale = config.training.initial_loss_scale,
                                      .growth_interval = config.training.loss_scale_window});
  }
}

OptimizerStep::Result OptimizerStep::apply(std::int64_t step, observe::TraceRecorder* tracing) {
  Result result;
  if (scaler_) {
    const TraceSpan span(tracing, "gradient clipping and optimizer", "compute");
    const auto scaled = scaler_->step(*optimizer_, lr_at(step), {.max_norm = max_norm_, .comm = grad_norm_group_});
    result = {.stepped = scaled.stepped,
              .grad_norm = scaled.norm,
              .loss_scale = scaled.scale,
              .next_loss_scale = scaler_->scale()};
  } else {
    const GradNorm norm = [&] {
      const TraceSpan span(tracing, "gradient clipping", "compute");
      return clip_grad_norm(optimizer_->parameters(), max_norm_, grad_norm_group_);
    }();
    result.grad_norm = norm.value();
    result.stepped = norm.is_finite();
    if (result.stepped) {
      const TraceSpan span(tracing, "optimizer", "compute");
      optimizer_->step(lr_at(step));
    }
  }
  optimizer_->zero_grad();
  return result;
}

void OptimizerStep::collect_state(TrainState& state) const {
  optimizer_->collect_state(state);
  if (!scaler_) return;
  TrainState scale;
  scaler_->collect_state(scale);
  for (auto& [name, tensor, shard] : scale.tensors) state.tensors.push_back({"layout." + name, tensor, shard});
}

}  // namespace phalanx::train
