#include "phalanx/optim/lr_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"

namespace phalanx {

LearningRateDecay learning_rate_decay_from(std::string_view name) {
  if (name == "linear") return LearningRateDecay::linear;
  if (name == "cosine") return LearningRateDecay::cosine;
  if (name == "sqrt") return LearningRateDecay::sqrt;
  throw ConfigError(fmt::format("[lr_scheduler] decay_type is '{}': expected linear, cosine or sqrt{}", name,
                                did_you_mean(name, {"linear", "cosine", "sqrt"})));
}

LearningRateSchedule::LearningRateSchedule(LearningRateScheduleOptions options) : options_(options) {
  if (!(options.base_lr >= 0 && std::isfinite(options.base_lr))) {
    throw ConfigError(fmt::format("[optimizer] lr is {}: expected 0 or a positive number", options.base_lr));
  }
  if (options.total_steps < 1) {
    throw ConfigError(fmt::format("[training] steps is {}: expected at least 1", options.total_steps));
  }
  if (options.warmup_steps < 0) {
    throw ConfigError(
        fmt::format("[lr_scheduler] warmup_steps is {}: expected 0 or a positive number", options.warmup_steps));
  }
  if (options.decay_ratio && !(*options.decay_ratio >= 0 && *options.decay_ratio <= 1)) {
    throw ConfigError(fmt::format("[lr_scheduler] decay_ratio is {}: expected 0 to 1", *options.decay_ratio));
  }
  if (!(options.min_lr_factor >= 0 && options.min_lr_factor <= 1)) {
    throw ConfigError(fmt::format("[lr_scheduler] min_lr_factor is {}: expected 0 to 1", options.min_lr_factor));
  }
  warmup_steps_ = std::min(options.warmup_steps, options.total_steps);
  const std::int64_t rest = options.total_steps - warmup_steps_;
  decay_steps_ = rest;
  if (options.decay_ratio) {
    // nearbyint rounds halves to even, as Python's round() does.
    decay_steps_ = std::min(rest, static_cast<std::int64_t>(
                                      std::nearbyint(static_cast<double>(options.total_steps) * *options.decay_ratio)));
  }
  // One virtual extra step, so that the last real step is not taken at the end value (zero by default).
  stable_steps_ = options.total_steps + 1 - warmup_steps_ - decay_steps_;
}

double LearningRateSchedule::lr_at(std::int64_t step) const {
  step = std::clamp<std::int64_t>(step, 0, options_.total_steps);
  if (step < warmup_steps_) {
    return options_.base_lr * static_cast<double>(step + 1) / static_cast<double>(warmup_steps_);
  }
  if (step < warmup_steps_ + stable_steps_) return options_.base_lr;
  const double progress =
      static_cast<double>(step + 1 - warmup_steps_ - stable_steps_) / static_cast<double>(decay_steps_);
  double factor = 0;
  switch (options_.decay_type) {
    case LearningRateDecay::linear:
      factor = 1 - progress;
      break;
    case LearningRateDecay::cosine:
      factor = 0.5 * (1 + std::cos(std::numbers::pi * progress));
      break;
    case LearningRateDecay::sqrt:
      factor = 1 - std::sqrt(progress);
      break;
  }
  return options_.base_lr * (options_.min_lr_factor + (1 - options_.min_lr_factor) * factor);
}

}  // namespace phalanx
