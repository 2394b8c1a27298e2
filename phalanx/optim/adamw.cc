#include "phalanx/optim/adamw.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/optim/step_kernels.h"

namespace phalanx {
namespace {

void require_in_unit_interval(const char* what, double value) {
  if (!(value >= 0 && value < 1))
    throw ConfigError(fmt::format("AdamW: {} is {}: expected 0 <= {} < 1", what, value, what));
}

}  // namespace

AdamW::AdamW(std::vector<NamedTensor> parameters, AdamWOptions options)
    : Optimizer(std::move(parameters), options.master_weights), options_(std::move(options)) {
  require_in_unit_interval("beta1", options_.beta1);
  require_in_unit_interval("beta2", options_.beta2);
  if (!(options_.eps > 0)) throw ConfigError(fmt::format("AdamW: eps is {}: expected a positive number", options_.eps));
  set_weight_decay("AdamW", options_.weight_decay, options_.no_decay);
  exp_avg_ = zeros_like_parameters();
  exp_avg_sq_ = zeros_like_parameters();
  for (const auto& [name, tensor, shard] : parameters_) {
    steps_.push_back(at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(tensor.device())));
  }
}

void AdamW::step_on_cpu(const std::vector<Target>& targets, double lr) {
  std::vector<AdamWStep> steps;  // by target
  steps.reserve(targets.size());
  for (const auto& target : targets) {
    float& step = *steps_[target.index].mutable_data_ptr<float>();
    step += 1;
    steps.emplace_back(lr, options_.beta1, options_.beta2, options_.eps, target.weight_decay, step);
  }
  for_each_part(targets, [&](std::size_t number, std::int64_t first, std::size_t count, const float* grad) {
    const Target& target = targets[number];
    adamw_step(steps[number], count, grad, target.parameter.mutable_data_ptr<float>() + first,
               exp_avg_[target.index].mutable_data_ptr<float>() + first,
               exp_avg_sq_[target.index].mutable_data_ptr<float>() + first);
  });
}

void AdamW::step_by_libtorch(const std::vector<Target>& targets, double lr, const std::optional<at::Tensor>& skip) {
  std::vector<at::Tensor> parameters, grads, exp_avg, exp_avg_sq, steps;
  for (const auto& target : targets) {
    parameters.push_back(target.parameter);
    grads.push_back(target.grad);
    exp_avg.push_back(exp_avg_[target.index]);
    exp_avg_sq.push_back(exp_avg_sq_[target.index]);
    steps.push_back(steps_[target.index]);
  }
  if (skip) {
    at::_foreach_add_(steps, skip->neg().add_(1));
  } else {
    at::_foreach_add_(steps, 1);
  }
  at::_fused_adamw_(parameters, grads, exp_avg, exp_avg_sq, /*max_exp_avg_sqs=*/{}, steps, lr, options_.beta1,
                    options_.beta2, targets.front().weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false,
                    /*grad_scale=*/{}, /*found_inf=*/skip);
}

void AdamW::collect_state(TrainState& state) const {
  collect_elements(state, exp_avg_, "exp_avg");
  collect_elements(state, exp_avg_sq_, "exp_avg_sq");
  collect_replicated(state, steps_, "step");
  collect_masters(state);
}

}  // namespace phalanx
