#include "phalanx/optim/lion.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>

#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/optim/step_kernels.h"

namespace phalanx {

Lion::Lion(std::vector<NamedTensor> parameters, LionOptions options)
    : Optimizer(std::move(parameters), {.master_weights = options.master_weights}), options_(std::move(options)) {
  for (const auto& [name, value] : {std::pair("beta1", options_.beta1), {"beta2", options_.beta2}}) {
    if (value >= 0 && value < 1) continue;
    throw ConfigError(fmt::format("Lion: {} is {}: expected 0 <= {} < 1", name, value, name));
  }
  set_groups("Lion", options_.weight_decay, options_.no_decay, options_.groups);
  exp_avg_ = zeros_like_parameters();
}

void Lion::step_on_cpu(const std::vector<Target>& targets) {
  for_each_part(targets, [&](std::size_t number, std::int64_t first, std::size_t count, const float* grad) {
    const Target& target = targets[number];
    const LionStep step{static_cast<float>(target.lr), static_cast<float>(target.lr * target.weight_decay),
                        static_cast<float>(1 - options_.beta1), static_cast<float>(1 - options_.beta2)};
    lion_step(step, count, grad, target.parameter.mutable_data_ptr<float>() + first,
              exp_avg_[target.index].mutable_data_ptr<float>() + first);
  });
}

// libtorch has no fused kernel for it.
void Lion::step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) {
  for (const auto& target : targets) {
    const at::Tensor &p = target.parameter, &m = exp_avg_[target.index];
    const at::Tensor mean = m.lerp(target.grad, 1 - options_.beta1);
    const at::Tensor direction = at::where(mean.isnan(), mean, mean.sign());
    const at::Tensor next = p.mul(1 - target.lr * target.weight_decay).add_(direction, -target.lr);
    const at::Tensor next_mean = m.lerp(target.grad, 1 - options_.beta2);
    p.copy_(skip ? at::where(skip->ne(0), p, next) : next);
    m.copy_(skip ? at::where(skip->ne(0), m, next_mean) : next_mean);
  }
}

void Lion::collect_state(TrainState& state) const {
  collect_elements(state, exp_avg_, "exp_avg");
  collect_masters(state);
}

}  // namespace phalanx
