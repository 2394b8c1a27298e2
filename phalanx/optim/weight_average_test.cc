#include "phalanx/optim/weight_average.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/tensor/init.h"

namespace phalanx::weight_average_test {
namespace {

at::Tensor numbers(std::int64_t count, const std::string& name) {
  at::Tensor x = at::empty({count});
  fill(x, Init::normal(0.0, 1.0), 5, name);
  return x;
}

TEST(WeightAverage, FollowsTheFormula) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const at::NoGradGuard no_grad;
    const at::Tensor weight = numbers(70'001, "start").to(dtype);
    at::Tensor expected = weight.clone();
    WeightAverage average({{"w", weight}}, {.decay = 0.75, .start_step = 2, .update_every = 3});
    TrainState state;
    average.collect_state(state);
    ASSERT_THAT(state.tensors, SizeIs(1));
    EXPECT_EQ(state.tensors[0].name, "ema.w");
    for (int step = 1; step <= 9; ++step) {
      weight.copy_(numbers(70'001, std::to_string(step)));
      average.update(step);
      if (step <= 2) expected = weight.clone();
      if (step == 5 || step == 8) expected = expected * 0.75 + weight * 0.25;
      EXPECT_TRUE(at::allclose(state.tensors[0].tensor, expected, 1e-6, 1e-6)) << step << ", " << dtype;
    }
    EXPECT_FALSE(at::allclose(state.tensors[0].tensor, weight, 1e-2, 1e-2));
  }
}

TEST(WeightAverage, AnElementGetsTheSameBitsWhereverItsArrayIsCut) {
  const at::NoGradGuard no_grad;
  const at::Tensor whole = numbers(1'003, "start");
  const at::Tensor first = whole.narrow(0, 0, 411).clone(), second = whole.narrow(0, 411, 592).clone();
  WeightAverage of_whole({{"w", whole}}, {.decay = 0.9}), of_parts({{"a", first}, {"b", second}}, {.decay = 0.9});
  for (int step = 1; step <= 4; ++step) {
    whole.copy_(numbers(1'003, std::to_string(step)));
    first.copy_(whole.narrow(0, 0, 411));
    second.copy_(whole.narrow(0, 411, 592));
    of_whole.update(step);
    of_parts.update(step);
  }
  TrainState a, b;
  of_whole.collect_state(a);
  of_parts.collect_state(b);
  EXPECT_TRUE(at::equal(a.tensors[0].tensor.narrow(0, 0, 411), b.tensors[0].tensor));
  EXPECT_TRUE(at::equal(a.tensors[0].tensor.narrow(0, 411, 592), b.tensors[1].tensor));
}

TEST(WeightAverage, IsSwappedInAndBack) {
  const at::NoGradGuard no_grad;
  const at::Tensor weight = numbers(9, "start"), start = weight.clone();
  WeightAverage average({{"w", weight}}, {.decay = 0.5});
  weight.add_(1);
  average.update(1);
  const at::Tensor moved = weight.clone();
  const auto version = weight._version();
  average.swap();
  EXPECT_TRUE(at::allclose(weight, start + 0.5));
  EXPECT_GT(weight._version(), version);  // what was gathered of it is old
  average.swap();
  EXPECT_TRUE(at::equal(weight, moved));
}

TEST(WeightAverage, ASkippedStepChangesNothing) {
  const at::NoGradGuard no_grad;
  const at::Tensor weight = at::ones({3});
  WeightAverage average({{"w", weight}}, {.decay = 0.5, .start_step = 1});
  TrainState state;
  average.collect_state(state);
  weight.fill_(3);
  for (const int step : {1, 2}) {  // a copy, and a mean
    average.update(step, at::ones({}));
    EXPECT_TRUE(at::equal(state.tensors[0].tensor, at::ones({3})));
  }
  average.update(2, at::full({}, 0.0F));
  EXPECT_TRUE(at::equal(state.tensors[0].tensor, at::full({3}, 2.0F)));
}

TEST(WeightAverage, RefusesWrongOptions) {
  const auto refusal = [](WeightAverageOptions options, at::ScalarType dtype = at::kFloat) {
    return error_text([&] { WeightAverage average({{"w", at::ones({2}, dtype)}}, options); });
  };
  EXPECT_THAT(refusal({.decay = 1}), HasSubstr("decay is 1: expected 0 <= decay < 1"));
  EXPECT_THAT(refusal({.update_every = 0}), HasSubstr("update_every is 0: expected 1 or more"));
  EXPECT_THAT(refusal({}, at::kBFloat16), HasSubstr("parameter 'w' has dtype BFloat16: expected float32"));
}

}  // namespace
}  // namespace phalanx::weight_average_test
