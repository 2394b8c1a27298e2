#include "phalanx/optim/loss_scaler.h"

#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/optim/grad_norm.h"

namespace phalanx {
namespace {

constexpr double kNormEpsilon = 1e-6;  // as in clip_grad_norm()

void require(bool valid, const char* option, double value, const char* expected) {
  if (!valid) throw ConfigError(fmt::format("loss scaler: {} is {}: expected {}", option, value, expected));
}

}  // namespace

LossScaler::LossScaler(LossScalerOptions options) : options_(options) {
  const auto& o = options_;
  require(o.initial_scale >= o.smallest_scale && std::isfinite(o.initial_scale), "initial_scale", o.initial_scale,
          "a finite number, not below smallest_scale");
  require(o.growth_factor > 1 && std::isfinite(o.growth_factor), "growth_factor", o.growth_factor, "more than 1");
  require(o.backoff_factor > 0 && o.backoff_factor < 1, "backoff_factor", o.backoff_factor, "between 0 and 1");
  require(o.growth_interval > 0, "growth_interval", static_cast<double>(o.growth_interval), "a positive number");
  require(o.smallest_scale > 0, "smallest_scale", o.smallest_scale, "a positive number");
  scale_ = at::full({}, o.initial_scale, at::TensorOptions(at::kDouble));
  good_steps_ = at::full({}, 0, at::TensorOptions(at::kLong));
}

double LossScaler::scale() const { return *scale_.const_data_ptr<double>(); }

at::Tensor LossScaler::scaled(const at::Tensor& loss) const { return loss.mul(scale()); }

LossScaler::Result LossScaler::step(Optimizer& optimizer, double lr, StepOptions options) {
  if (!(options.max_norm > 0)) {
    throw ConfigError(fmt::format("loss scaler: max_norm is {}: expected a positive number", options.max_norm));
  }
  double& scale = *scale_.mutable_data_ptr<double>();
  std::int64_t& good_steps = *good_steps_.mutable_data_ptr<std::int64_t>();
  const double scaled_norm = grad_norm(optimizer.parameters(), options.comm).value();
  Result result{std::isfinite(scaled_norm), scaled_norm / scale, scale};
  if (!result.stepped) {
    good_steps = 0;
    if (scale * options_.backoff_factor < options_.smallest_scale) {
      throw Error(
          fmt::format("loss scaler: the gradients are not finite (norm {}) with the loss scaled by {}, the "
                      "smallest allowed being {}: the loss or the model itself overflows, look at its values",
                      scaled_norm, scale, options_.smallest_scale));
    }
    scale *= options_.backoff_factor;
    return result;
  }
  const double clip = std::min(1.0, options.max_norm / (result.norm + kNormEpsilon));
  optimizer.step(lr, {.grad_factor = clip / scale});
  if (++good_steps == options_.growth_interval) {
    good_steps = 0;
    // Only while the scale fits into a float32: one more growth would make every loss infinite.
    if (scale * options_.growth_factor <= std::numeric_limits<float>::max()) scale *= options_.growth_factor;
  }
  return result;
}

void LossScaler::collect_state(TrainState& state) const {
  state.tensors.push_back({"loss_scaler.scale", scale_});
  state.tensors.push_back({"loss_scaler.good_steps", good_steps_});
}

}  // namespace phalanx
