#include "phalanx/optim/adadelta.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/optim/step_kernels.h"

namespace phalanx {

Adadelta::Adadelta(std::vector<NamedTensor> parameters, AdadeltaOptions options)
    : Optimizer(std::move(parameters), {.master_weights = options.master_weights}), options_(std::move(options)) {
  if (!(options_.rho >= 0 && options_.rho < 1)) {
    throw ConfigError(fmt::format("Adadelta: rho is {}: expected 0 <= rho < 1", options_.rho));
  }
  if (!(options_.eps > 0)) {
    throw ConfigError(fmt::format("Adadelta: eps is {}: expected a positive number", options_.eps));
  }
  set_groups("Adadelta", options_.weight_decay, options_.no_decay, options_.groups);
  square_avg_ = zeros_like_parameters();
  acc_delta_ = zeros_like_parameters();
}

void Adadelta::step_on_cpu(const std::vector<Target>& targets) {
  for_each_part(targets, [&](std::size_t number, std::int64_t first, std::size_t count, const float* grad) {
    const Target& target = targets[number];
    const AdadeltaStep step{static_cast<float>(target.lr), static_cast<float>(options_.rho),
                            static_cast<float>(1 - options_.rho), static_cast<float>(options_.eps),
                            static_cast<float>(target.weight_decay)};
    adadelta_step(step, count, grad, target.parameter.mutable_data_ptr<float>() + first,
                  square_avg_[target.index].mutable_data_ptr<float>() + first,
                  acc_delta_[target.index].mutable_data_ptr<float>() + first);
  });
}

// libtorch has no fused kernel for it. A step that may be skipped works on copies.
void Adadelta::step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) {
  for (const auto& target : targets) {
    const std::array<at::Tensor, 3> old = {square_avg_[target.index], acc_delta_[target.index], target.parameter};
    std::array<at::Tensor, 3> stepped = old;
    if (skip) std::ranges::transform(old, stepped.begin(), [](const at::Tensor& tensor) { return tensor.clone(); });
    const auto& [v, u, p] = stepped;
    const at::Tensor g = target.weight_decay == 0 ? target.grad : target.grad.add(p, target.weight_decay);
    v.mul_(options_.rho).addcmul_(g, g, 1 - options_.rho);
    const at::Tensor d = u.add(options_.eps).sqrt_().div_(v.add(options_.eps).sqrt_()).mul_(g);
    u.mul_(options_.rho).addcmul_(d, d, 1 - options_.rho);
    p.add_(d, -target.lr);
    for (std::size_t i = 0; skip && i < old.size(); ++i) old[i].copy_(at::where(skip->ne(0), old[i], stepped[i]));
  }
}

void Adadelta::collect_state(TrainState& state) const {
  collect_elements(state, square_avg_, "square_avg");
  collect_elements(state, acc_delta_, "acc_delta");
  collect_masters(state);
}

}  // namespace phalanx
