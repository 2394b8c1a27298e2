#include "phalanx/optim/loss_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/optim/grad_norm.h"

namespace phalanx {
namespace {

constexpr double kNormEpsilon = 1e-6;  // as in clip_grad_norm()
// The scale must fit into a float32: one more growth would make every loss infinite.
constexpr double kLargestScale = std::numeric_limits<float>::max();

void require(bool valid, const char* option, double value, const char* expected) {
  if (!valid) throw ConfigError(fmt::format("loss scaler: {} is {}: expected {}", option, value, expected));
}

void require_max_norm(double max_norm) {
  if (!(max_norm > 0)) {
    throw ConfigError(fmt::format("loss scaler: max_norm is {}: expected a positive number", max_norm));
  }
}

}  // namespace

LossScaler::LossScaler(LossScalerOptions options, at::Device device) : options_(options) {
  const auto& o = options_;
  require(o.initial_scale >= o.smallest_scale && std::isfinite(o.initial_scale), "initial_scale", o.initial_scale,
          "a finite number, not below smallest_scale");
  require(o.growth_factor > 1 && std::isfinite(o.growth_factor), "growth_factor", o.growth_factor, "more than 1");
  require(o.backoff_factor > 0 && o.backoff_factor < 1, "backoff_factor", o.backoff_factor, "between 0 and 1");
  require(o.growth_interval > 0, "growth_interval", static_cast<double>(o.growth_interval), "a positive number");
  require(o.smallest_scale > 0, "smallest_scale", o.smallest_scale, "a positive number");
  scale_ = at::full({}, o.initial_scale, at::TensorOptions(at::kDouble).device(device));
  good_steps_ = at::full({}, 0, at::TensorOptions(at::kLong).device(device));
}

double LossScaler::scale() const { return scale_.item<double>(); }

at::Tensor LossScaler::scaled(const at::Tensor& loss) const {
  return scale_.device().is_cpu() ? loss.mul(scale()) : loss.mul(scale_.to(loss.scalar_type()));
}

void LossScaler::require_scale_left(const Result& result) const {
  if (result.stepped || result.scale * options_.backoff_factor >= options_.smallest_scale) return;
  throw Error(
      fmt::format("loss scaler: the gradients are not finite (norm {}) with the loss scaled by {}, the smallest "
                  "allowed being {}: the loss or the model itself overflows, look at its values",
                  result.norm, result.scale, options_.smallest_scale));
}

LossScaler::Result LossScaler::step(Optimizer& optimizer, double lr, const StepOptions& options) {
  require_max_norm(options.max_norm);
  if (!scale_.device().is_cpu()) {
    const DeviceResult found = step_on_device(optimizer, lr, options);
    const Result result{found.stepped.item<double>() != 0, found.norm.item<double>(), found.scale.item<double>()};
    require_scale_left(result);
    return result;
  }
  double& scale = *scale_.mutable_data_ptr<double>();
  std::int64_t& good_steps = *good_steps_.mutable_data_ptr<std::int64_t>();
  const double scaled_norm = grad_norm(optimizer.parameters(), options.comm).value();
  const Result result{std::isfinite(scaled_norm), scaled_norm / scale, scale};
  if (!result.stepped) {
    good_steps = 0;
    require_scale_left(result);
    scale *= options_.backoff_factor;
    return result;
  }
  const double clip = std::min(1.0, options.max_norm / (result.norm + kNormEpsilon));
  optimizer.step(lr, {.grad_factor = clip / scale});
  if (++good_steps == options_.growth_interval) {
    good_steps = 0;
    if (scale * options_.growth_factor <= kLargestScale) scale *= options_.growth_factor;
  }
  return result;
}

LossScaler::DeviceResult LossScaler::step_on_device(Optimizer& optimizer, double lr, const StepOptions& options) {
  require_max_norm(options.max_norm);
  const at::NoGradGuard no_grad;
  const at::Tensor scaled_norm = grad_norm(optimizer.parameters(), options.comm).on_device();
  at::Tensor skip = at::isfinite(scaled_norm).logical_not();
  if (options.skip.defined()) skip.logical_or_(options.skip);
  DeviceResult result{.stepped = skip.logical_not().to(at::kDouble),
                      .norm = scaled_norm.div(scale_),
                      .scale = scale_.clone(),
                      .next_scale = at::Tensor()};
  const at::Tensor clip = at::full_like(scale_, options.max_norm).div(result.norm.add(kNormEpsilon)).clamp_max_(1);
  optimizer.step(lr, {.grad_factor_tensor = clip.div_(scale_), .skip = skip.to(at::kFloat)});
  update_on_device(skip);
  result.next_scale = scale_.clone();
  return result;
}

// No operator here takes a number from the host as a tensor: its copy to the device would be a wait.
void LossScaler::update_on_device(const at::Tensor& skip) {
  const at::Tensor grows = good_steps_.add_(1).eq(options_.growth_interval);
  good_steps_.masked_fill_(grows.logical_or(skip), 0);
  const at::Tensor lower = scale_.mul(options_.backoff_factor), higher = scale_.mul(options_.growth_factor);
  const at::Tensor lowers = skip.logical_and(lower.ge(options_.smallest_scale));
  const at::Tensor rises = grows.logical_and(skip.logical_not()).logical_and_(higher.le(kLargestScale));
  scale_.copy_(at::where(lowers, lower, at::where(rises, higher, scale_)));
}

void LossScaler::collect_state(TrainState& state) const {
  state.tensors.push_back({"loss_scaler.scale", scale_});
  state.tensors.push_back({"loss_scaler.good_steps", good_steps_});
}

}  // namespace phalanx
