// Optimizer steps that the device decides to skip, and the loss scale that it sets.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/optim/adadelta.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/lion.h"
#include "phalanx/optim/loss_scaler.h"
#include "phalanx/optim/muon.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/tensor/device_readback.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"
#include "phalanx/train/model/optimizer_step.h"

namespace phalanx {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class SkippedSteps : public SimTest {
 protected:
  using Make = std::function<std::unique_ptr<Optimizer>(std::vector<NamedTensor>)>;
  static std::vector<Make> optimizers() {
    return {[](auto parameters) { return std::make_unique<AdamW>(std::move(parameters)); },
            [](auto parameters) {
              return std::make_unique<AdamW>(
                  std::move(parameters),
                  AdamWOptions{.master_weights = false, .state_dtype = at::kBFloat16, .stochastic_rounding = true});
            },
            [](auto parameters) {
              return std::make_unique<AdamW>(std::move(parameters), AdamWOptions{.state_dtype = at::kBFloat16});
            },
            [](auto parameters) { return std::make_unique<Sgd>(std::move(parameters), SgdOptions{.momentum = 0.9}); },
            [](auto parameters) { return std::make_unique<Lion>(std::move(parameters)); },
            [](auto parameters) { return std::make_unique<Adadelta>(std::move(parameters)); },
            [](auto parameters) { return std::make_unique<Muon>(std::move(parameters)); }};
  }
  at::Tensor wave(double frequency, at::ScalarType dtype) const {
    const at::Tensor x = at::arange(100, at::TensorOptions(at::kFloat)).view({4, 25});
    return at::sin(x.mul(frequency)).to(dtype).to(device);
  }
  at::Tensor flag(bool is_set) const { return at::full({}, is_set ? 1.0 : 0.0, on_sim()); }

  struct Stepper {
    at::Tensor w;
    std::unique_ptr<Optimizer> optimizer;
    std::vector<at::Tensor> state() const {
      TrainState all;
      optimizer->collect_state(all);
      std::vector<at::Tensor> values = {w.detach().to(at::kCPU)};
      for (const auto& named : all.tensors) values.push_back(named.tensor.to(at::kCPU, /*non_blocking=*/false, true));
      return values;
    }
  };
  Stepper stepper(const Make& make, at::ScalarType dtype) const {
    const at::Tensor w = wave(0.3, dtype).requires_grad_();
    return {w, make({{"w", w}})};
  }
  static void expect_equal(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
  }
};

TEST_F(SkippedSteps, LeaveAllAsItWasAndOthersStepAsWithoutAFlag) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    std::size_t number = 0;
    for (const Make& make : optimizers()) {
      SCOPED_TRACE(testing::Message() << dtype << " optimizer " << number++);
      const Stepper plain = stepper(make, dtype), flagged = stepper(make, dtype);
      for (const bool skips : {true, false, true, false}) {
        const at::Tensor grad = wave(0.7, dtype);
        plain.w.mutable_grad() = grad;
        flagged.w.mutable_grad() = skips ? grad * kInf : grad;
        const at::Tensor skip = flag(skips);
        sim.runtime.host_waits().clear();
        if (!skips) plain.optimizer->step(1e-2);
        flagged.optimizer->step(1e-2, {.skip = skip});
        EXPECT_EQ(waits(), 0);
        expect_equal(flagged.state(), plain.state());
      }
    }
  }
}

TEST_F(SkippedSteps, TakeAFactorFromTheDevice) {
  for (const Make& make : optimizers()) {
    const Stepper plain = stepper(make, at::kBFloat16), scaled = stepper(make, at::kBFloat16);
    for (const Stepper* one : {&plain, &scaled}) one->w.mutable_grad() = wave(0.7, at::kBFloat16);
    const at::Tensor factor = at::full({}, 0.3, on_sim().dtype(at::kDouble));
    sim.runtime.host_waits().clear();
    plain.optimizer->step(1e-2, {.grad_factor = 0.3});
    scaled.optimizer->step(1e-2, {.grad_factor_tensor = factor});
    EXPECT_EQ(waits(), 0);
    expect_equal(scaled.state(), plain.state());
  }
}

TEST_F(SkippedSteps, OnTheCpuTheOptionsAreRead) {
  const at::Tensor w = at::ones({3}).requires_grad_();
  Sgd optimizer({{"w", w}});
  w.mutable_grad() = at::ones({3});
  optimizer.step(1.0, {.skip = at::ones({})});
  EXPECT_TRUE(at::equal(w.detach(), at::ones({3})));
  optimizer.step(1.0, {.grad_factor_tensor = at::full({}, 0.5), .skip = at::full({}, 0.0)});
  EXPECT_TRUE(at::equal(w.detach(), at::full({3}, 0.5)));
}

TEST_F(SkippedSteps, RefuseOptionsOfAnotherDevice) {
  const Stepper one = stepper(optimizers()[0], at::kFloat);
  one.w.mutable_grad() = wave(0.7, at::kFloat);
  EXPECT_THAT(error_text([&] { one.optimizer->step(1e-2, {.skip = at::ones({})}); }),
              HasSubstr("optimizer: skip is of shape [] on cpu; expected a 0-dim tensor on sim:0, as parameter 'w'"));
  EXPECT_THAT(error_text([&] { one.optimizer->step(1e-2, {.grad_factor_tensor = at::ones({1}, on_sim())}); }),
              HasSubstr("grad_factor_tensor is of shape [1] on sim:0; expected a 0-dim tensor"));
}

// Without loss scaling, the first step whose loss or norm is not finite is the last that may change anything.
TEST_F(SkippedSteps, NoStepFollowsOneThatWasNotFinite) {
  for (const bool bad_loss : {true, false}) {
    for (const std::string precision : {"float32", "float16"}) {
      if (precision == "float16" && !bad_loss) continue;  // is skipped, and the next step steps
      const at::Tensor w = wave(0.3, at::kFloat).requires_grad_();
      train::OptimizerStep optimizer_step(
          config::parse_config("", "test", {"--training.mixed_precision_param=" + precision}), {{"w", w}}, nullptr);
      const auto queue = [&](int step, float loss, float gradient) {
        w.mutable_grad() = at::full({4, 25}, gradient, on_sim());
        const at::Tensor loss_tensor = at::full({}, loss, on_sim());
        sim.runtime.host_waits().clear();
        const DeviceReadback readback(optimizer_step.queue(step, loss_tensor));
        EXPECT_EQ(waits(), 0);
        const std::vector<double> numbers = readback.read();
        EXPECT_EQ(numbers[0], loss);
        return optimizer_step.result_of(numbers);
      };
      const at::Tensor first = w.detach().cpu();
      EXPECT_TRUE(queue(0, 2, 1).stepped);
      const at::Tensor second = w.detach().cpu();
      EXPECT_FALSE(at::equal(first, second));
      EXPECT_FALSE(queue(1, bad_loss ? kInf : 2, bad_loss ? 1 : kInf).stepped);
      EXPECT_FALSE(queue(2, 2, 1).stepped);
      EXPECT_TRUE(at::equal(w.detach().cpu(), second));
      // Whoever waits for each step may go on.
      w.mutable_grad() = at::ones({4, 25}, on_sim());
      EXPECT_TRUE(optimizer_step.apply(3).stepped);
      EXPECT_FALSE(at::equal(w.detach().cpu(), second));
    }
  }
}

// The same gradients give the same scales, and the same weights, as on the CPU.
TEST_F(SkippedSteps, TheLossScaleIsTheCpusWithoutAWait) {
  const LossScalerOptions options = {
      .initial_scale = 96, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 2, .smallest_scale = 2};
  const at::Tensor on_cpu = at::ones({4}).requires_grad_();
  const at::Tensor on_device = at::ones({4}, on_sim()).requires_grad_();
  Sgd optimizer({{"w", on_cpu}}, {.momentum = 0.9}), device_optimizer({{"w", on_device}}, {.momentum = 0.9});
  LossScaler scaler(options), device_scaler(options, device);
  const std::vector<float> gradients = {kInf, 3, 5, 2, -kInf, 1, 1, 1, 1, 7, 0, NAN, NAN, 2};
  for (const float gradient : gradients) {
    on_cpu.mutable_grad() = at::full({4}, gradient);
    on_device.mutable_grad() = at::full({4}, gradient, on_sim());
    const LossScaler::Result expected = scaler.step(optimizer, 0.1, {.max_norm = 0.05});
    sim.runtime.host_waits().clear();
    const auto found = device_scaler.step_on_device(device_optimizer, 0.1, {.max_norm = 0.05});
    EXPECT_EQ(waits(), 0);
    EXPECT_EQ(found.stepped.item<double>() != 0, expected.stepped);
    EXPECT_EQ(found.scale.item<double>(), expected.scale);
    EXPECT_EQ(found.next_scale.item<double>(), scaler.scale());
    if (expected.stepped) {
      EXPECT_DOUBLE_EQ(found.norm.item<double>(), expected.norm);
    }
    EXPECT_TRUE(at::allclose(on_device.detach().cpu(), on_cpu.detach(), 1e-6)) << gradient;
  }
  const at::Tensor loss = at::full({}, 0.1);
  EXPECT_EQ(device_scaler.scaled(loss.to(device)).item<float>(), scaler.scaled(loss).item<float>());
}

TEST_F(SkippedSteps, ALossScaleOnTheDeviceStopsAtTheSmallest) {
  const at::Tensor w = at::ones({4}, on_sim()).requires_grad_();
  Sgd optimizer({{"w", w}});
  LossScaler scaler({.initial_scale = 4, .smallest_scale = 1}, device);
  w.mutable_grad() = at::full({4}, kInf, on_sim());
  EXPECT_FALSE(scaler.step(optimizer, 0.1, {}).stepped);
  EXPECT_FALSE(scaler.step(optimizer, 0.1, {}).stepped);
  EXPECT_THAT(error_text([&] { scaler.step(optimizer, 0.1, {}); }),
              HasSubstr("not finite (norm inf) with the loss scaled by 1, the smallest allowed being 1"));
  EXPECT_EQ(scaler.scale(), 1);
}

}  // namespace
}  // namespace phalanx
