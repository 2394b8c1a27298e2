#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/nn/conv2d.h"
#include "phalanx/nn/dropout.h"
#include "phalanx/nn/init.h"

namespace phalanx::nn {
namespace {

TEST(Conv2dTest, SumsItsWindowAndStartsAsTorchsDoes) {
  Conv2d layer({.in_channels = 2, .out_channels = 8, .kernel = 3, .padding = 1});
  initialise(layer, 1);
  const double bound = 1.0 / std::sqrt(18.0);
  for (const at::Tensor& p : {layer.weight, layer.bias}) {
    EXPECT_LE(p.abs().max().item<double>(), bound);
    EXPECT_GT(p.abs().max().item<double>(), bound / 2);
  }
  const at::NoGradGuard no_grad;
  layer.weight.fill_(1.0);
  layer.bias.copy_(at::arange(8));
  const at::Tensor y = call(layer, at::ones({1, 2, 4, 5}));
  ASSERT_EQ(y.sizes(), at::IntArrayRef({1, 8, 4, 5}));
  EXPECT_EQ(y[0][3][0][0].item<float>(), 2 * 4 + 3);  // a corner sees 2 x 2 pixels of both channels
  EXPECT_EQ(y[0][3][1][2].item<float>(), 2 * 9 + 3);
}

TEST(DropoutTest, DropsItsShareAndKeepsTheMean) {
  Dropout dropout(0.25);
  dropout.rng_state("a", {.seed = 1});
  const at::Tensor x = at::ones({1000, 100}).requires_grad_();
  const at::Tensor y = call(dropout, x);
  const at::Tensor dropped = y.eq(0);
  EXPECT_NEAR(dropped.sum().item<double>() / 1e5, 0.25, 0.01);  // seven standard deviations
  EXPECT_TRUE(at::equal(y.masked_select(~dropped), at::ones({1}).div(0.75).expand({(~dropped).sum().item<long>()})));
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y));  // the same mask for the gradient
  dropout.eval();
  EXPECT_TRUE(at::equal(call(dropout, x), x));
}

TEST(DropoutTest, IsAFunctionOfSeedStepLayerAndRow) {
  const auto mask = [](const std::string& layer, PlaceInRun rng_state, std::int64_t rows) {
    Dropout dropout(0.5);
    dropout.rng_state(layer, rng_state);
    return call(dropout, at::ones({rows, 7}));
  };
  const at::Tensor whole = mask("a", {.seed = 1, .step = 3}, 10);
  EXPECT_TRUE(at::equal(whole, mask("a", {.seed = 1, .step = 3}, 10)));
  EXPECT_TRUE(at::equal(
      whole, at::cat({mask("a", {.seed = 1, .step = 3}, 4), mask("a", {.seed = 1, .step = 3, .first_row = 4}, 6)})));
  EXPECT_FALSE(at::equal(whole, mask("a", {.seed = 2, .step = 3}, 10)));
  EXPECT_FALSE(at::equal(whole, mask("a", {.seed = 1, .step = 4}, 10)));
  EXPECT_FALSE(at::equal(whole, mask("b", {.seed = 1, .step = 3}, 10)));
  EXPECT_EQ(mask("a", {}, 0).numel(), 0);
}

TEST(DropoutTest, GpuKernelsDropTheSame) {
  for (const Dropout::SplitOf& split :
       {Dropout::SplitOf{}, Dropout::SplitOf{.dim = 0, .part = 2, .parts = 3},
        Dropout::SplitOf{.dim = 1, .part = 1, .parts = 2}, Dropout::SplitOf{.dim = -1, .part = 3, .parts = 5}}) {
    Dropout dropout(0.4);
    dropout.set_split(split);
    dropout.rng_state("a", {.seed = 1, .step = 3, .first_row = 2});
    for (const at::Tensor& x : {at::ones({3, 4, 7}), at::ones({2, 5}), at::ones({1, 1, 1})}) {
      const at::Tensor expected = call(dropout, x);
      const kernels::HostGpuKernels use;
      EXPECT_TRUE(at::equal(call(dropout, x), expected)) << split.dim << " " << x.sizes();
    }
  }
}

TEST(DropoutTest, EveryLayerOfAModelIsPlacedByItsName) {
  struct Two : Module {
    Two() : Module("Two") {
      first = register_module("first", std::make_shared<Dropout>(0.5));
      second = register_module("second", std::make_shared<Dropout>(0.5));
    }
    at::Tensor forward(const at::Tensor& x) { return at::cat({call(first, x), call(second, x)}); }
    std::shared_ptr<Dropout> first, second;
  } two;
  set_dropout_rng_state(two, {.seed = 4, .step = 2});
  EXPECT_EQ(two.second->layer(), "second");
  EXPECT_EQ(two.second->rng_state()->step, 2);
  const at::Tensor y = call(two, at::ones({8, 8}));
  EXPECT_FALSE(at::equal(y.narrow(0, 0, 8), y.narrow(0, 8, 8)));
}

TEST(DropoutTest, RefusesWrongProbabilitiesAndAMissingPlace) {
  for (const double p : {-0.1, 1.0, std::nan("")}) EXPECT_THROW(Dropout{p}, ConfigError) << p;
  Dropout dropout(0.5);
  EXPECT_THAT(error_text([&] { call(dropout, at::ones({1})); }), HasSubstr("call nn::set_dropout_rng_state(model"));
}

}  // namespace
}  // namespace phalanx::nn
