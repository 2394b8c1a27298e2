#include "phalanx/optim/loss_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/sgd.h"

namespace phalanx {
namespace {

at::Tensor wave(double frequency) { return at::sin(at::arange(100, at::TensorOptions(at::kFloat)).mul(frequency)); }

TEST(LossScalerTest, APowerOfTwoChangesNoBitOfFloat32) {
  // The gradient of (w * x).sum() * scale is x * scale.
  // Not AdamW, which hardly sees a common factor of all gradients.
  const auto scaled = wave(0.7).requires_grad_(), plain = wave(0.7).requires_grad_();
  Sgd optimizer({{"w", scaled}}, {.momentum = 0.9}), reference({{"w", plain}}, {.momentum = 0.9});
  LossScaler scaler;
  for (int step = 0; step < 4; ++step) {
    const auto x = wave(0.2 + step);
    scaler.scaled(scaled.mul(x).sum()).backward();
    plain.mul(x).sum().backward();
    const auto result = scaler.step(optimizer, 1e-3, {});
    EXPECT_TRUE(result.stepped);
    EXPECT_EQ(result.scale, 65536);
    EXPECT_DOUBLE_EQ(result.norm, grad_norm(reference.parameters()).value());
    reference.step(1e-3);
    EXPECT_TRUE(at::equal(scaled.detach(), plain.detach())) << step;
    optimizer.zero_grad();
    reference.zero_grad();
  }
}

TEST(LossScalerTest, ClipsTheGradientsWithoutTheScale) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {  // double: by libtorch's kernel
    const auto w = at::ones({4}, dtype).requires_grad_();
    Sgd optimizer({{"w", w}});
    LossScaler scaler({.initial_scale = 1024});
    w.mutable_grad() = at::full({4}, 3.0 * 1024, dtype);  // 3 each, norm 6
    const auto result = scaler.step(optimizer, 1.0, {.max_norm = 1.5});
    EXPECT_DOUBLE_EQ(result.norm, 6) << dtype;
    EXPECT_NEAR(w[2].item<double>(), 1 - 0.75, 1e-6) << dtype;
    EXPECT_EQ(w.grad()[0].item<double>(), 3 * 1024) << dtype;  // unchanged
  }
}

TEST(LossScalerTest, GradientsTooSmallForFloat16ReachTheWeights) {
  const auto w = at::ones({4}, at::kHalf).requires_grad_();
  Sgd optimizer({{"w", w}});
  LossScaler scaler;
  // 2^-30 is 0 in float16; times 2^16 it is not.
  const auto loss = w.to(at::kFloat).sum().mul(0x1p-30);
  scaler.scaled(loss).backward();
  ASSERT_GT(w.grad()[0].item<float>(), 0);
  EXPECT_TRUE(scaler.step(optimizer, 0x1p+20, {}).stepped);
  EXPECT_EQ(w[0].item<float>(), static_cast<float>(1 - 0x1p-10));
}

TEST(LossScalerTest, FallsAndGrows) {
  const auto w = at::ones({2}).requires_grad_();
  AdamW optimizer({{"w", w}});
  LossScaler scaler({.initial_scale = 8, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
  const auto step = [&](float gradient) {
    w.mutable_grad() = at::full({2}, gradient);
    return scaler.step(optimizer, 0.1, {});
  };
  const auto before = w.detach().clone();
  EXPECT_FALSE(step(std::numeric_limits<float>::infinity()).stepped);
  EXPECT_TRUE(at::equal(w.detach(), before));
  TrainState state;
  optimizer.collect_state(state);
  EXPECT_EQ(state.tensors[2].tensor.item<float>(), 0);  // not counted either
  EXPECT_EQ(scaler.scale(), 2);
  for (const double expected : {2.0, 2.0, 8.0, 8.0, 8.0, 32.0, 32.0}) {
    EXPECT_TRUE(step(1).stepped);
    EXPECT_EQ(scaler.scale(), expected);
  }
  EXPECT_FALSE(step(std::nanf("")).stepped);  // restarts the count
  for (const double expected : {8.0, 8.0, 32.0}) {
    step(1);
    EXPECT_EQ(scaler.scale(), expected);
  }
}

TEST(LossScalerTest, AllRanksSkipTogether) {
  run_local_ranks(3, [](const std::shared_ptr<Communicator>& comm) {
    const ShardSpec spec("w", {3, 2}, DataType::f32, MeshShape({{"dp", 3}}), Placement::parse("dp:S(0)"));
    const auto shard = std::make_shared<const Shard>(Shard{spec, comm->rank()});
    const auto w = at::ones({1, 2}).requires_grad_();
    Sgd optimizer({{"w", w, shard}});
    LossScaler scaler;
    const auto step = [&](float gradient) {
      w.mutable_grad() = at::full({1, 2}, gradient);
      return scaler.step(optimizer, 0.1, {.comm = comm.get()}).stepped;
    };
    EXPECT_FALSE(step(comm->rank() == 1 ? std::numeric_limits<float>::infinity() : 1.0F));
    EXPECT_EQ(scaler.scale(), 32768);
    EXPECT_TRUE(at::equal(w.detach(), at::ones({1, 2})));
    EXPECT_TRUE(step(32768));
    EXPECT_NEAR(w[0][0].item<double>(), 0.9, 1e-6);
  });
}

TEST(LossScalerTest, StateContinues) {
  const auto w = at::ones({2}).requires_grad_();
  Sgd optimizer({{"w", w}});
  LossScaler scaler({.initial_scale = 8, .growth_interval = 3}), other({.initial_scale = 1024, .growth_interval = 3});
  w.mutable_grad() = at::ones({2});
  for (int i = 0; i < 2; ++i) scaler.step(optimizer, 0.1, {});
  TrainState from, to;
  scaler.collect_state(from);
  other.collect_state(to);
  ASSERT_EQ(from.tensors.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(from.tensors[i].name, to.tensors[i].name);
    to.tensors[i].tensor.copy_(from.tensors[i].tensor);
  }
  EXPECT_EQ(other.scale(), 8);
  other.step(optimizer, 0.1, {});
  EXPECT_EQ(other.scale(), 16);  // the third step
}

template <class Body>
void expect_scaler_error(const std::string& part, Body&& body) {
  EXPECT_THAT(error_text([&] { body(); }), HasSubstr(part));
}

TEST(LossScalerTest, RefusesWrongOptionsAndAModelThatIsNeverFinite) {
  expect_scaler_error("initial_scale is 0: expected", [] { LossScaler({.initial_scale = 0}); });
  expect_scaler_error("growth_factor is 1: expected more than 1", [] { LossScaler({.growth_factor = 1}); });
  expect_scaler_error("backoff_factor is 1: expected between 0 and 1", [] { LossScaler({.backoff_factor = 1}); });
  expect_scaler_error("growth_interval is 0: expected", [] { LossScaler({.growth_interval = 0}); });
  expect_scaler_error("smallest_scale is 0: expected", [] { LossScaler({.smallest_scale = 0}); });
  const auto w = at::ones({2}).requires_grad_();
  Sgd optimizer({{"w", w}});
  LossScaler scaler({.initial_scale = 4, .smallest_scale = 1});
  expect_scaler_error("max_norm is 0", [&] { scaler.step(optimizer, 0.1, {.max_norm = 0}); });
  w.mutable_grad() = at::full({2}, std::numeric_limits<float>::infinity());
  EXPECT_FALSE(scaler.step(optimizer, 0.1, {}).stepped);
  EXPECT_FALSE(scaler.step(optimizer, 0.1, {}).stepped);
  expect_scaler_error("not finite (norm inf) with the loss scaled by 1, the smallest allowed being 1",
                      [&] { scaler.step(optimizer, 0.1, {}); });
}

}  // namespace
}  // namespace phalanx
