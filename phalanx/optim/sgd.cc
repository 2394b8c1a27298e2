#include "phalanx/optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>
#include <fmt/format.h>

#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/optim/step_kernels.h"

namespace phalanx {

Sgd::Sgd(std::vector<NamedTensor> parameters, SgdOptions options)
    : Optimizer(std::move(parameters), {.master_weights = options.master_weights}), options_(std::move(options)) {
  if (!(options_.momentum >= 0 && options_.momentum < 1)) {
    throw ConfigError(fmt::format("SGD: momentum is {}: expected 0 <= momentum < 1", options_.momentum));
  }
  set_groups("SGD", options_.weight_decay, options_.no_decay, options_.groups);
  if (options_.nesterov && options_.momentum == 0) {
    throw ConfigError("SGD: nesterov needs a momentum greater than 0");
  }
  if (options_.momentum > 0) momentum_buffer_ = zeros_like_parameters();
}

void Sgd::step_on_cpu(const std::vector<Target>& targets) {
  for_each_part(targets, [&](std::size_t number, std::int64_t first, std::size_t count, const float* grad) {
    const Target& target = targets[number];
    const SgdStep step{static_cast<float>(target.lr), static_cast<float>(options_.momentum),
                       static_cast<float>(target.weight_decay), options_.nesterov};
    sgd_step(step, count, grad, target.parameter.mutable_data_ptr<float>() + first,
             momentum_buffer_.empty() ? nullptr : momentum_buffer_[target.index].mutable_data_ptr<float>() + first);
  });
}

void Sgd::step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) {
  std::vector<at::Tensor> parameters, grads, momentum;
  for (const auto& target : targets) {
    parameters.push_back(target.parameter);
    grads.push_back(target.grad);
    if (!momentum_buffer_.empty()) momentum.push_back(momentum_buffer_[target.index]);
  }
  at::_fused_sgd_(parameters, grads, momentum, targets.front().weight_decay, options_.momentum, targets.front().lr,
                  /*dampening=*/0.0, options_.nesterov, /*maximize=*/false, /*is_first_step=*/false, /*grad_scale=*/{},
                  /*found_inf=*/skip);
}

void Sgd::collect_state(TrainState& state) const {
  if (!momentum_buffer_.empty()) collect_elements(state, momentum_buffer_, "momentum_buffer");
  collect_masters(state);
}

}  // namespace phalanx
