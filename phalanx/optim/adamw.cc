#include "phalanx/optim/adamw.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <map>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

void require_in_unit_interval(const char* what, double value) {
  if (!(value >= 0 && value < 1))
    throw ConfigError(fmt::format("AdamW: {} is {}: expected 0 <= {} < 1", what, value, what));
}

// The fused kernel wants lists of one device and dtype each.
struct FusedLists {
  std::vector<at::Tensor> parameters, grads, exp_avg, exp_avg_sq, steps;
};

}  // namespace

AdamW::AdamW(std::vector<NamedTensor> parameters, AdamWOptions options)
    : Optimizer(std::move(parameters)), options_(options) {
  require_in_unit_interval("beta1", options.beta1);
  require_in_unit_interval("beta2", options.beta2);
  if (!(options.eps > 0)) throw ConfigError(fmt::format("AdamW: eps is {}: expected a positive number", options.eps));
  if (!(options.weight_decay >= 0)) {
    throw ConfigError(fmt::format("AdamW: weight_decay is {}: expected 0 or a positive number", options.weight_decay));
  }
  exp_avg_ = zeros_like_parameters();
  exp_avg_sq_ = zeros_like_parameters();
  for (const auto& [name, tensor, shard] : parameters_) {
    steps_.push_back(at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(tensor.device())));
  }
}

void AdamW::step(double lr) {
  const at::NoGradGuard no_grad;
  std::map<std::pair<int, int>, FusedLists> groups;  // by device and dtype
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined()) continue;
    const at::Device device = parameter.device();
    auto& lists =
        groups[{static_cast<int>(device.type()) * 256 + device.index(), static_cast<int>(parameter.scalar_type())}];
    lists.parameters.push_back(parameter);
    lists.grads.push_back(grad);
    lists.exp_avg.push_back(exp_avg_[i]);
    lists.exp_avg_sq.push_back(exp_avg_sq_[i]);
    lists.steps.push_back(steps_[i]);
  }
  for (auto& [key, lists] : groups) {
    at::_foreach_add_(lists.steps, 1);
    at::_fused_adamw_(lists.parameters, lists.grads, lists.exp_avg, lists.exp_avg_sq, /*max_exp_avg_sqs=*/{},
                      lists.steps, lr, options_.beta1, options_.beta2, options_.weight_decay, options_.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
}

void AdamW::collect_state(TrainState& state) const {
  collect(state, parameters_, exp_avg_, "exp_avg");
  collect(state, parameters_, exp_avg_sq_, "exp_avg_sq");
  collect(state, parameters_, steps_, "step");
}

}  // namespace phalanx
