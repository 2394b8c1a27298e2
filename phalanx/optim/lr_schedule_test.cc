#include "phalanx/optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

LearningRateScheduleOptions hundred_steps() {
  return {.base_lr = 0.5, .total_steps = 100, .warmup_steps = 10, .min_lr_factor = 0.1};
}

TEST(LearningRateSchedule, WarmsUpLinearlyFromTheFirstStep) {
  const LearningRateSchedule schedule(hundred_steps());
  for (int step = 0; step < 10; ++step) EXPECT_DOUBLE_EQ(schedule.lr_at(step), 0.5 * (step + 1) / 10);
  EXPECT_DOUBLE_EQ(schedule.lr_at(10), 0.5);  // the stable stretch is one step long when no decay_ratio is given
}

TEST(LearningRateSchedule, DecaysByTheNamedCurve) {
  for (const auto type : {LearningRateDecay::linear, LearningRateDecay::cosine, LearningRateDecay::sqrt}) {
    auto options = hundred_steps();
    options.decay_type = type;
    const LearningRateSchedule schedule(options);
    EXPECT_EQ(schedule.decay_steps(), 90);
    for (int step = 11; step < 100; ++step) {
      const double progress = (step - 10) / 90.0;
      const double curve = type == LearningRateDecay::linear   ? 1 - progress
                           : type == LearningRateDecay::cosine ? 0.5 + 0.5 * std::cos(std::numbers::pi * progress)
                                                               : 1 - std::sqrt(progress);
      EXPECT_NEAR(schedule.lr_at(step), 0.5 * (0.1 + 0.9 * curve), 1e-15) << step;
    }
    EXPECT_GT(schedule.lr_at(99), 0.05);  // the last real step has not reached the end value
    EXPECT_DOUBLE_EQ(schedule.lr_at(100), 0.05);
    EXPECT_DOUBLE_EQ(schedule.lr_at(1'000'000), 0.05);
  }
}

TEST(LearningRateSchedule, DecayRatioLeavesAStableStretch) {
  auto options = hundred_steps();
  options.decay_ratio = 0.2;
  const LearningRateSchedule schedule(options);
  for (int step = 10; step <= 80; ++step) EXPECT_DOUBLE_EQ(schedule.lr_at(step), 0.5) << step;
  for (int step = 81; step < 100; ++step) {
    EXPECT_NEAR(schedule.lr_at(step), 0.5 * (0.1 + 0.9 * (1 - (step - 80) / 20.0)), 1e-15) << step;
  }
}

TEST(LearningRateSchedule, TheDecaysLengthIsRoundedAsPythonRounds) {
  LearningRateScheduleOptions options = {.total_steps = 10, .warmup_steps = 0};
  for (const auto& [ratio, steps] : {std::pair{0.25, 2}, {0.35, 4}, {0.37, 4}, {0.75, 8}}) {
    options.decay_ratio = ratio;
    EXPECT_EQ(LearningRateSchedule(options).decay_steps(), steps) << ratio;
  }
}

TEST(LearningRateSchedule, AWarmUpOnlyAndAConstantRate) {
  auto options = hundred_steps();
  options.decay_ratio = 0.0;
  const LearningRateSchedule constant(options);
  EXPECT_DOUBLE_EQ(constant.lr_at(99), 0.5);
  EXPECT_DOUBLE_EQ(constant.lr_at(5000), 0.5);
  options.warmup_steps = 0;
  EXPECT_DOUBLE_EQ(LearningRateSchedule(options).lr_at(0), 0.5);
}

TEST(LearningRateSchedule, CutsPartsThatDoNotFit) {
  auto options = hundred_steps();
  options.warmup_steps = 1000;
  EXPECT_EQ(LearningRateSchedule(options).warmup_steps(), 100);
  EXPECT_DOUBLE_EQ(LearningRateSchedule(options).lr_at(99), 0.5);
  options.warmup_steps = 40;
  options.decay_ratio = 0.9;
  EXPECT_EQ(LearningRateSchedule(options).decay_steps(), 60);
}

void expect_config_error(const LearningRateScheduleOptions& options, const std::string& part) {
  EXPECT_THAT(error_text<ConfigError>([&] { const LearningRateSchedule schedule(options); }), HasSubstr(part));
}

TEST(LearningRateSchedule, RefusesValuesOutOfRange) {
  expect_config_error({.base_lr = -1}, "[optimizer] lr is -1");
  expect_config_error({.base_lr = std::nan("")}, "[optimizer] lr is nan");
  expect_config_error({.total_steps = 0}, "[training] steps is 0");
  expect_config_error({.warmup_steps = -1}, "[lr_scheduler] warmup_steps is -1");
  expect_config_error({.decay_ratio = 1.5}, "[lr_scheduler] decay_ratio is 1.5");
  expect_config_error({.decay_ratio = -0.5}, "[lr_scheduler] decay_ratio is -0.5");
  expect_config_error({.min_lr_factor = -0.1}, "[lr_scheduler] min_lr_factor is -0.1");
  expect_config_error({.min_lr_factor = 1.1}, "[lr_scheduler] min_lr_factor is 1.1");
}

TEST(LearningRateSchedule, ReadsTheNameOfADecay) {
  EXPECT_EQ(learning_rate_decay_from("cosine"), LearningRateDecay::cosine);
  EXPECT_EQ(learning_rate_decay_from("linear"), LearningRateDecay::linear);
  EXPECT_EQ(learning_rate_decay_from("sqrt"), LearningRateDecay::sqrt);
  EXPECT_THAT(error_text<ConfigError>([&] { learning_rate_decay_from("cosin"); }), HasSubstr("did you mean 'cosine'?"));
}

}  // namespace
}  // namespace phalanx
