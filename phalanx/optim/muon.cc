#include "phalanx/optim/muon.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/optim/step_kernels.h"
#include "phalanx/optim/widen.h"
#include "phalanx/tensor/scale_in_place.h"

namespace phalanx {
namespace {

constexpr std::int64_t kMostSteps = 99;  // torch's

std::vector<NamedTensor> matrices_among(std::vector<NamedTensor> parameters) {
  for (const NamedTensor& parameter : parameters) {
    const auto shape = parameter.global_shape();
    const bool is_matrix = shape.size() == 2 && shape[0] > 0 && shape[1] > 0;
    if (is_matrix) continue;
    throw Error(
        fmt::format("Muon: parameter '{}' has {} dimensions: expected a matrix with elements; give the others to "
                    "another optimizer (optimizer_set.h)",
                    parameter.name, shape.size()));
  }
  return parameters;
}

}  // namespace

MuonAdjustment muon_adjustment_from(std::string_view name) {
  if (name == "original") return MuonAdjustment::original;
  if (name == "match_rms_adamw") return MuonAdjustment::match_rms_adamw;
  throw ConfigError(fmt::format("Muon: adjust_lr is '{}': expected original or match_rms_adamw{}", name,
                                did_you_mean(std::string(name), {"original", "match_rms_adamw"})));
}

Muon::Muon(std::vector<NamedTensor> parameters, MuonOptions options, Communicator* comm)
    : Optimizer(matrices_among(std::move(parameters)), {.master_weights = options.master_weights}),
      options_(std::move(options)),
      exchange_(parameters_, newton_schulz_cost, comm) {
  const NewtonSchulzOptions& iteration = options_.newton_schulz;
  if (!(options_.momentum >= 0 && options_.momentum < 1)) {
    throw ConfigError(fmt::format("Muon: momentum is {}: expected 0 <= momentum < 1", options_.momentum));
  }
  if (iteration.steps < 1 || iteration.steps > kMostSteps) {
    throw ConfigError(fmt::format("Muon: ns_steps is {}: expected 1 to {}", iteration.steps, kMostSteps));
  }
  if (!(iteration.eps > 0)) {
    throw ConfigError(fmt::format("Muon: eps is {}: expected a positive number", iteration.eps));
  }
  if (!(options_.lr_factor >= 0)) {
    throw ConfigError(fmt::format("Muon: lr_factor is {}: expected 0 or a positive number", options_.lr_factor));
  }
  set_groups("Muon", options_.weight_decay, options_.no_decay, options_.groups);
  momentum_buffer_ = zeros_like_parameters();
}

double Muon::adjusted(const Target& target) const {
  const auto shape = parameters_[target.index].global_shape();
  const auto rows = static_cast<double>(shape[0]), columns = static_cast<double>(shape[1]);
  const double ratio = options_.adjust_lr == MuonAdjustment::original ? std::sqrt(std::max(1.0, rows / columns))
                                                                      : 0.2 * std::sqrt(std::max(rows, columns));
  return target.lr * ratio;
}

void Muon::prepare(std::vector<Target>& targets, const std::optional<at::Tensor>& skip) {
  std::vector<std::size_t> chosen;
  std::vector<at::Tensor> updates(targets.size()), on_cpu_updates;
  std::vector<Target> on_cpu;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    Target& target = targets[i];
    target.lr *= options_.lr_factor;
    chosen.push_back(target.index);
    if (target.parameter.device().is_cpu() && target.parameter.scalar_type() == at::kFloat) {
      updates[i] = at::empty_like(target.parameter, at::kBFloat16);
      on_cpu.push_back(target);
      on_cpu_updates.push_back(updates[i]);
    } else {
      updates[i] = add_to_momentum(target, skip);
    }
  }
  add_to_momentum_on_cpu(std::move(on_cpu), on_cpu_updates);
  const std::vector<at::Tensor> results = exchange_.apply(
      chosen, updates, [&](const at::Tensor& whole) { return newton_schulz(whole, options_.newton_schulz); });
  for (std::size_t i = 0; i < targets.size(); ++i) {
    Target& target = targets[i];
    target.grad = results[i];
    if (target.grad.strides() != target.parameter.strides()) {
      target.grad = at::empty_like(target.parameter, at::kBFloat16).copy_(results[i]);
    }
    target.grad_factor = 1;
    target.grad_factor_tensor.reset();
  }
}

void Muon::add_to_momentum_on_cpu(std::vector<Target> targets, const std::vector<at::Tensor>& updates) {
  for (Target& target : targets) target.narrow.reset();  // no parameter changes yet
  const MuonMomentum momentum{static_cast<float>(1 - options_.momentum), static_cast<float>(options_.momentum),
                              options_.nesterov};
  for_each_part(targets, [&](std::size_t number, std::int64_t first, std::size_t count, const float* grad) {
    constexpr std::size_t kTile = 2048;
    float update[kTile];
    float* const buffer = momentum_buffer_[targets[number].index].mutable_data_ptr<float>() + first;
    auto* const narrowed = updates[number].mutable_data_ptr<at::BFloat16>() + first;
    for (std::size_t done = 0; done < count; done += kTile) {
      const std::size_t elements = std::min(kTile, count - done);
      muon_momentum(momentum, elements, grad + done, buffer + done, update);
      narrow(at::kBFloat16, elements, update, narrowed + done);
    }
  });
}

at::Tensor Muon::add_to_momentum(const Target& target, const std::optional<at::Tensor>& skip) {
  const at::Tensor& buffer = momentum_buffer_[target.index];
  at::Tensor grad = target.grad.to(buffer.scalar_type());
  if (target.grad_factor != 1) grad = grad.mul(target.grad_factor);
  if (target.grad_factor_tensor.defined()) grad = scaled(grad, target.grad_factor_tensor);
  const at::Tensor stepped = at::lerp(buffer, grad, 1 - options_.momentum);
  buffer.copy_(skip ? at::where(skip->ne(0), buffer, stepped) : stepped);
  return (options_.nesterov ? at::lerp(grad, buffer, options_.momentum) : buffer).to(at::kBFloat16);
}

void Muon::step_on_cpu(const std::vector<Target>& targets) {
  for_each_part(targets, [&](std::size_t number, std::int64_t first, std::size_t count, const float* update) {
    const Target& target = targets[number];
    const MuonStep step{static_cast<float>(1 - target.lr * target.weight_decay), static_cast<float>(adjusted(target))};
    muon_step(step, count, update, target.parameter.mutable_data_ptr<float>() + first);
  });
}

void Muon::step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) {
  for (const Target& target : targets) {
    const at::Tensor stepped =
        target.parameter.mul(1 - target.lr * target.weight_decay).sub_(target.grad, adjusted(target));
    target.parameter.copy_(skip ? at::where(skip->ne(0), target.parameter, stepped) : stepped);
  }
}

void Muon::collect_state(TrainState& state) const {
  collect_elements(state, momentum_buffer_, "momentum_buffer");
  collect_masters(state);
}

}  // namespace phalanx
