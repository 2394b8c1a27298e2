#include "phalanx/optim/sgd.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_sgd.h>
#include <fmt/format.h>

#include <map>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {

Sgd::Sgd(std::vector<NamedTensor> parameters, SgdOptions options)
    : Optimizer(std::move(parameters)), options_(options) {
  if (!(options.momentum >= 0 && options.momentum < 1)) {
    throw ConfigError(fmt::format("SGD: momentum is {}: expected 0 <= momentum < 1", options.momentum));
  }
  if (!(options.weight_decay >= 0)) {
    throw ConfigError(fmt::format("SGD: weight_decay is {}: expected 0 or a positive number", options.weight_decay));
  }
  if (options.nesterov && options.momentum == 0) {
    throw ConfigError("SGD: nesterov needs a momentum greater than 0");
  }
  if (options.momentum > 0) momentum_buffer_ = zeros_like_parameters();
}

void Sgd::step(double lr) {
  const at::NoGradGuard no_grad;
  struct Lists {
    std::vector<at::Tensor> parameters, grads, momentum;
  };
  std::map<std::pair<int, int>, Lists> groups;  // by device and dtype: what the fused kernel wants
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined()) continue;
    const at::Device device = parameter.device();
    auto& lists =
        groups[{static_cast<int>(device.type()) * 256 + device.index(), static_cast<int>(parameter.scalar_type())}];
    lists.parameters.push_back(parameter);
    lists.grads.push_back(grad);
    if (!momentum_buffer_.empty()) lists.momentum.push_back(momentum_buffer_[i]);
  }
  for (auto& [key, lists] : groups) {
    at::_fused_sgd_(lists.parameters, lists.grads, lists.momentum, options_.weight_decay, options_.momentum, lr,
                    /*dampening=*/0.0, options_.nesterov, /*maximize=*/false, /*is_first_step=*/false);
  }
}

void Sgd::collect_state(TrainState& state) const {
  if (!momentum_buffer_.empty()) collect(state, parameters_, momentum_buffer_, "momentum_buffer");
}

}  // namespace phalanx
