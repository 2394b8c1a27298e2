#include "phalanx/optim/adamw.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/kernels/gpu_launch.h"
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
  set_groups("AdamW", options_.weight_decay, options_.no_decay, options_.groups);
  exp_avg_ = zeros_like_parameters();
  exp_avg_sq_ = zeros_like_parameters();
  for (const auto& [name, tensor, shard] : parameters_) {
    steps_.push_back(at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(tensor.device())));
  }
}

void AdamW::step_on_cpu(const std::vector<Target>& targets) {
  std::vector<AdamWStep> steps;  // by target
  steps.reserve(targets.size());
  for (const auto& target : targets) {
    float& step = *steps_[target.index].mutable_data_ptr<float>();
    step += 1;
    steps.emplace_back(target.lr, options_.beta1, options_.beta2, options_.eps, target.weight_decay, step);
  }
  for_each_part(targets, [&](std::size_t number, std::int64_t first, std::size_t count, const float* grad) {
    const Target& target = targets[number];
    adamw_step(steps[number], count, grad, target.parameter.mutable_data_ptr<float>() + first,
               exp_avg_[target.index].mutable_data_ptr<float>() + first,
               exp_avg_sq_[target.index].mutable_data_ptr<float>() + first);
  });
}

void AdamW::step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) {
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
  at::_fused_adamw_(parameters, grads, exp_avg, exp_avg_sq, /*max_exp_avg_sqs=*/{}, steps, targets.front().lr,
                    options_.beta1, options_.beta2, targets.front().weight_decay, options_.eps, /*amsgrad=*/false,
                    /*maximize=*/false,
                    /*grad_scale=*/{}, /*found_inf=*/skip);
}

bool AdamW::scales_gradients_itself() const {
  return std::ranges::all_of(parameters_, [](const NamedTensor& parameter) {
    const at::Tensor& tensor = parameter.tensor;
    return tensor.scalar_type() == at::kFloat && kernels::gpu_kernels_on(tensor.device().type()) != nullptr;
  });
}

bool AdamW::step_by_gpu_kernel(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) {
  namespace gpu = kernels::gpu;
  const auto launch = kernels::gpu_launch(targets.front().parameter);
  if (!launch) return false;
  std::map<gpu::Type, std::vector<gpu::AdamWTensor>> by_grad_type;
  std::vector<float*> steps;
  for (const Target& target : targets) {
    if (!kernels::is_gpu_type(target.grad)) return false;
    float* const step = steps_[target.index].mutable_data_ptr<float>();
    steps.push_back(step);
    by_grad_type[kernels::gpu_type(target.grad.scalar_type())].push_back(
        {target.parameter.numel(), target.parameter.mutable_data_ptr<float>(), target.grad.const_data_ptr(),
         exp_avg_[target.index].mutable_data_ptr<float>(), exp_avg_sq_[target.index].mutable_data_ptr<float>(),
         /*copy=*/nullptr, step});
  }
  const Target& first = targets.front();  // the factors are those of all
  at::Tensor factor = first.grad_factor_tensor;
  if (factor.defined()) factor = factor.to(at::kDouble).mul(first.grad_factor).to(at::kFloat);
  if (!factor.defined() && first.grad_factor != 1) {
    factor = at::full({}, first.grad_factor, first.parameter.options().dtype(at::kFloat));
  }
  const float* const skip_value = skip ? skip->const_data_ptr<float>() : nullptr;
  launch->check(
      "AdamW", launch->kernels().increment(launch->stream(), static_cast<int>(steps.size()), steps.data(), skip_value));
  for (const auto& [type, tensors] : by_grad_type) {
    const gpu::AdamWSettings settings = {.lr = first.lr,
                                         .beta1 = options_.beta1,
                                         .beta2 = options_.beta2,
                                         .eps = options_.eps,
                                         .weight_decay = first.weight_decay,
                                         .grad_type = type,
                                         .copy_type = gpu::Type::f32,
                                         .grad_scale = factor.defined() ? factor.const_data_ptr<float>() : nullptr,
                                         .skip = skip_value};
    launch->check(
        "AdamW", launch->kernels().adamw(launch->stream(), static_cast<int>(tensors.size()), tensors.data(), settings));
  }
  return true;
}

void AdamW::collect_state(TrainState& state) const {
  collect_elements(state, exp_avg_, "exp_avg");
  collect_elements(state, exp_avg_sq_, "exp_avg_sq");
  collect_replicated(state, steps_, "step");
  collect_masters(state);
}

}  // namespace phalanx
