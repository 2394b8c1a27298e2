// The learning rate as a function of the step: linear warm-up, a stable phase, then a decay.
//
//        base_lr  ____________________
//               /                     \            warmup_steps: from base_lr / warmup_steps up to base_lr
//              /                       \           decay_ratio:  the share of all steps spent decaying at the end;
//             /                         \_ min                   absent: everything after the warm-up
//            0     warmup      stable   decay
//
// Keys and numbers are those of torchtitan's [lr_scheduler]: a decay starts from base_lr, and a virtual step after the
// last one has the end value min_lr_factor * base_lr. Warm-up-stable-decay is decay_ratio < 1. lr_at() depends only on
// its argument: there is no state to save.
//
//   LearningRateSchedule schedule({.base_lr = 3e-4, .total_steps = 1000, .warmup_steps = 100,
//                                  .decay_type = LearningRateDecay::cosine, .min_lr_factor = 0.1});
//   optimizer.step(schedule.lr_at(step));     // step counts from 0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx {

enum class LearningRateDecay { linear, cosine, sqrt };

/// Accepts "linear", "cosine" or "sqrt". Any other name throws a ConfigError that names the nearest.
LearningRateDecay learning_rate_decay_from(std::string_view name);

struct LearningRateScheduleOptions {
  double base_lr = 8e-4;
  std::int64_t total_steps = 10'000;
  std::int64_t warmup_steps = 200;
  std::optional<double> decay_ratio;  // 0: no decay
  LearningRateDecay decay_type = LearningRateDecay::linear;
  double min_lr_factor = 0.0;
};

class LearningRateSchedule {
 public:
  /// Throws ConfigError on values out of range. A warm-up longer than the run is cut to the run. A decay that does not
  /// fit after the warm-up is cut to the remaining steps.
  explicit LearningRateSchedule(LearningRateScheduleOptions options);

  double lr_at(std::int64_t step) const;  // steps past the end keep the end value
  std::int64_t warmup_steps() const noexcept { return warmup_steps_; }
  std::int64_t decay_steps() const noexcept { return decay_steps_; }

 private:
  LearningRateScheduleOptions options_;
  std::int64_t warmup_steps_ = 0, stable_steps_ = 0, decay_steps_ = 0;
};

}  // namespace phalanx
