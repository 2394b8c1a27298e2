#include "phalanx/train/model/optimizer_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/name_patterns.h"
#include "phalanx/models/config/parameter_kinds.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/lion.h"
#include "phalanx/optim/muon.h"
#include "phalanx/optim/optimizer_set.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/train/model/expert_load.h"
#include "phalanx/train/model/precision.h"
#include "phalanx/train/model/trained_model.h"

namespace phalanx::train {
namespace {

using observe::TraceSpan;

/// [[optimizer.groups]] without what matches `others` alone.
std::vector<ParameterGroup> groups_of(const config::OptimizerGroups& groups, const std::vector<NamedTensor>& parameters,
                                      const std::vector<std::string>& others) {
  std::vector<ParameterGroup> result;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::string what = fmt::format("[[optimizer.groups]], group {}", i + 1);
    result.push_back({.params = patterns_that_match(parameters, what, groups[i].params, others),
                      .lr_factor = groups[i].lr_factor,
                      .weight_decay = groups[i].weight_decay});
  }
  return result;
}

std::vector<std::string> with_names_of(std::vector<std::string> names, const std::vector<NamedTensor>& tensors) {
  for (const NamedTensor& one : tensors) names.push_back(one.name);
  return names;
}

/// Matrices inside of blocks, and the others.
std::pair<std::vector<NamedTensor>, std::vector<NamedTensor>> split_for_muon(
    const std::vector<std::string>& adamw_params, const std::vector<NamedTensor>& parameters,
    const std::vector<std::string>& frozen) {
  const std::vector<std::string> names = with_names_of({}, parameters);
  const auto taken = matching_names(
      "[muon] adamw_params", patterns_that_match(parameters, "[muon] adamw_params", adamw_params, frozen), names);
  std::vector<NamedTensor> matrices, others;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const bool is_matrix = models::is_block_matrix(names[i], parameters[i].global_shape().size()) && !taken[i];
    (is_matrix ? matrices : others).push_back(parameters[i]);
  }
  if (!matrices.empty()) return {matrices, others};
  throw ConfigError(
      "[optimizer] name is \"Muon\", but no matrix of a block is trained by it: expected some; AdamW trains the "
      "others");
}

std::unique_ptr<Optimizer> make_muon(const config::TrainConfig& config, const std::vector<NamedTensor>& matrices,
                                     const std::vector<std::string>& others, Communicator* comm) {
  const auto& muon = config.muon;
  const auto& optimizer = config.optimizer;
  MuonOptions options{.momentum = muon.momentum,
                      .nesterov = muon.nesterov,
                      .newton_schulz = {.steps = muon.ns_steps, .eps = muon.eps},
                      .adjust_lr = muon_adjustment_from(muon.adjust_lr_fn),
                      .lr_factor = muon.lr ? *muon.lr / optimizer.lr : 1,
                      .weight_decay = muon.weight_decay.value_or(optimizer.weight_decay),
                      .no_decay = patterns_that_match(matrices, "[optimizer] no_decay", optimizer.no_decay, others),
                      .groups = groups_of(optimizer.groups, matrices, others)};
  std::ranges::copy(muon.ns_coefficients, options.newton_schulz.coefficients.begin());
  return std::make_unique<Muon>(matrices, std::move(options), comm);
}

std::unique_ptr<Optimizer> make_elementwise(const config::TrainConfig& run, const std::vector<NamedTensor>& parameters,
                                            const std::vector<std::string>& frozen) {
  const config::TrainConfig::Optimizer& config = run.optimizer;
  const std::vector<std::string> no_decay =
      patterns_that_match(parameters, "[optimizer] no_decay", config.no_decay, frozen);
  const std::vector<ParameterGroup> groups = groups_of(config.groups, parameters, frozen);
  if (config.name == "SGD") {
    return std::make_unique<Sgd>(
        parameters,
        SgdOptions{
            .momentum = config.momentum, .weight_decay = config.weight_decay, .no_decay = no_decay, .groups = groups});
  }
  if (config.name == "Lion") {
    return std::make_unique<Lion>(parameters, LionOptions{.beta1 = config.beta1,
                                                          .beta2 = config.beta2,
                                                          .weight_decay = config.weight_decay,
                                                          .no_decay = no_decay,
                                                          .groups = groups});
  }
  return std::make_unique<AdamW>(parameters, AdamWOptions{.beta1 = config.beta1,
                                                          .beta2 = config.beta2,
                                                          .eps = config.eps,
                                                          .weight_decay = config.weight_decay,
                                                          .no_decay = no_decay,
                                                          .groups = groups,
                                                          .master_weights = config.master_weights,
                                                          .state_dtype = moments_dtype(run),
                                                          .stochastic_rounding = config.stochastic_rounding,
                                                          .seed = static_cast<std::uint64_t>(run.debug.seed)});
}

std::unique_ptr<Optimizer> make_optimizer(const config::TrainConfig& config, const std::vector<NamedTensor>& parameters,
                                          const std::vector<std::string>& frozen, Communicator* world) {
  if (config.optimizer.name != "Muon") return make_elementwise(config, parameters, frozen);
  const auto [matrices, others] = split_for_muon(config.muon.adamw_params, parameters, frozen);
  std::unique_ptr<Optimizer> muon = make_muon(config, matrices, with_names_of(frozen, others), world);
  if (others.empty()) return muon;
  std::vector<std::unique_ptr<Optimizer>> members;
  members.push_back(std::move(muon));
  members.push_back(make_elementwise(config, others, with_names_of(frozen, matrices)));
  return std::make_unique<OptimizerSet>(std::move(members));
}

/// Matrices that are kept on the host meet there.
std::shared_ptr<Communicator> host_group_of(const config::TrainConfig& config, Communicator* world) {
  const bool is_needed = config.optimizer.name == "Muon" && config.training.enable_cpu_offload && world != nullptr;
  return is_needed ? world->split_host("muon") : nullptr;
}

LearningRateScheduleOptions schedule_options(const config::TrainConfig& config) {
  return {.base_lr = config.optimizer.lr,
          .total_steps = config.training.steps,
          .warmup_steps = config.lr_scheduler.warmup_steps,
          .decay_ratio = config.lr_scheduler.decay_ratio,
          .decay_type = learning_rate_decay_from(config.lr_scheduler.decay_type),
          .min_lr_factor = config.lr_scheduler.min_lr_factor};
}

}  // namespace

OptimizerStep::OptimizerStep(const config::TrainConfig& config, const std::vector<NamedTensor>& parameters,
                             Communicator* grad_norm_group, const std::vector<std::string>& frozen, Communicator* world)
    : host_group_(host_group_of(config, world)),
      optimizer_(make_optimizer(config, parameters, frozen,
                                host_group_        ? host_group_.get()
                                : world != nullptr ? world
                                                   : grad_norm_group)),
      schedule_(schedule_options(config)),
      device_(optimizer_->parameters().front().tensor.device()),
      max_norm_(config.training.max_norm > 0 ? config.training.max_norm : std::numeric_limits<double>::infinity()),
      grad_norm_group_(grad_norm_group) {
  if (config.ema.decay > 0) {
    average_.emplace(parameters, WeightAverageOptions{.decay = config.ema.decay,
                                                      .start_step = config.ema.start_step,
                                                      .update_every = config.ema.update_every});
  }
  if (scales_loss(config)) {
    scaler_.emplace(LossScalerOptions{.initial_scale = config.training.initial_loss_scale,
                                      .growth_interval = config.training.loss_scale_window},
                    device_);
  }
  if (is_on_device()) has_failed_ = at::zeros({}, at::TensorOptions(at::kBool).device(device_));
}

OptimizerStep::Result OptimizerStep::apply(std::int64_t step, observe::TraceRecorder* tracing) {
  if (is_on_device()) {
    has_failed_.zero_();  // the caller knows of earlier steps
    const at::Tensor numbers = queue(step, at::zeros({}, at::TensorOptions(device_)), tracing).cpu();
    return result_of({numbers.const_data_ptr<double>(), numbers.const_data_ptr<double>() + kQueued});
  }
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
  if (average_ && result.stepped) average_->update(step + 1);
  if (expert_load_) expert_load_->end_step(at::full({}, result.stepped ? 1.0 : 0.0, at::kFloat));
  optimizer_->zero_grad();
  return result;
}

at::Tensor OptimizerStep::queue(std::int64_t step, const at::Tensor& loss, observe::TraceRecorder* tracing) {
  const at::NoGradGuard no_grad;
  const at::Tensor loss_value = loss.detach().to(at::kDouble);
  has_failed_.logical_or_(at::isfinite(loss_value).logical_not());
  LossScaler::DeviceResult result;
  if (scaler_) {
    const TraceSpan span(tracing, "gradient clipping and optimizer", "compute");
    result = scaler_->step_on_device(*optimizer_, lr_at(step),
                                     {.max_norm = max_norm_, .comm = grad_norm_group_, .skip = has_failed_});
  } else {
    at::Tensor factor;
    {
      const TraceSpan span(tracing, "gradient clipping", "compute");
      const bool folds = optimizer_->scales_gradients_itself();
      result.norm = (folds ? grad_norm(optimizer_->parameters(), grad_norm_group_)
                           : clip_grad_norm(optimizer_->parameters(), max_norm_, grad_norm_group_))
                        .on_device();
      if (folds && std::isfinite(max_norm_)) factor = clip_factor(result.norm, max_norm_);
    }
    const TraceSpan span(tracing, "optimizer", "compute");
    has_failed_.logical_or_(at::isfinite(result.norm).logical_not());
    optimizer_->step(lr_at(step), {.grad_factor_tensor = factor, .skip = has_failed_.to(at::kFloat)});
    result.stepped = has_failed_.logical_not().to(at::kDouble);
    result.scale = result.next_scale = loss_value;  // in the place of nothing
  }
  if (average_) average_->update(step + 1, result.stepped.eq(0).to(at::kFloat));
  if (expert_load_) expert_load_->end_step(result.stepped);
  optimizer_->zero_grad();
  return at::stack({loss_value, result.stepped, result.norm, result.scale, result.next_scale});
}

OptimizerStep::Result OptimizerStep::result_of(const std::vector<double>& numbers) const {
  const bool stepped = has_stepped(numbers);
  if (!scaler_) return {.stepped = stepped, .grad_norm = numbers[2]};
  scaler_->require_scale_left({stepped, numbers[2], numbers[3]});
  return {.stepped = stepped, .grad_norm = numbers[2], .loss_scale = numbers[3], .next_loss_scale = numbers[4]};
}

bool OptimizerStep::swap_averages() {
  if (average_) average_->swap();
  return average_.has_value();
}

void OptimizerStep::collect_state(TrainState& state) const {
  optimizer_->collect_state(state);
  if (average_) average_->collect_state(state);
  if (!scaler_) return;
  TrainState scale;
  scaler_->collect_state(scale);
  for (auto& [name, tensor, shard] : scale.tensors) state.tensors.push_back({"layout." + name, tensor, shard});
}

}  // namespace phalanx::train
