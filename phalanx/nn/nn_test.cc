#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/kernels/rotary.h"
#include "phalanx/nn/attention.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/kv_cache.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/rms_norm.h"
#include "phalanx/nn/rotary.h"

namespace {

using phalanx::Init;
using phalanx::nn::call;
using phalanx::nn::KvCache;
using phalanx::nn::Linear;
using phalanx::nn::Module;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(Module, HooksRunInOrderAroundForwardAndMayReplaceTheOutput) {
  Linear linear({.in_features = 3, .out_features = 2});
  phalanx::nn::initialise(linear, 1);
  const at::Tensor x = at::randn({4, 3}), plain = call(linear, x);
  std::vector<std::string> order;
  linear.add_pre_forward_hook([&](Module&) { order.push_back("pre 1"); });
  linear.add_pre_forward_hook([&](Module&) { order.push_back("pre 2"); });
  linear.add_post_forward_hook([&](Module&, at::Tensor y) {
    order.push_back("post 1");
    return y * 2.0;
  });
  linear.add_post_forward_hook([&](Module&, at::Tensor y) {
    order.push_back("post 2");
    return y + 1.0;
  });
  EXPECT_TRUE(at::equal(call(linear, x), (plain + 1.0) * 2.0));
  EXPECT_THAT(order, ElementsAre("pre 1", "pre 2", "post 2", "post 1"));
}

TEST(Module, ChildrenOfAttentionRunTheirHooksToo) {
  phalanx::nn::Attention attention({.dim = 8, .n_heads = 2, .n_kv_heads = 1, .head_dim = 4});
  phalanx::nn::initialise(attention, 1);
  std::vector<std::string> order;
  for (const auto& child : attention.named_children()) {
    std::dynamic_pointer_cast<Module>(child.value())->add_pre_forward_hook([&order, name = child.key()](Module&) {
      order.push_back(name);
    });
  }
  const at::Tensor x = at::randn({2, 5, 8});
  const auto rope = phalanx::nn::rotary_tables(4, 5, 10000.0);
  const at::Tensor hooked = call(attention, x, rope);
  EXPECT_THAT(order, testing::UnorderedElementsAre("wq", "wk", "wv", "wo"));
  EXPECT_EQ(order.back(), "wo");
}

TEST(Module, InitIsTheLayersStatementAndAnUnknownNameIsAnError) {
  Linear linear({.in_features = 64, .out_features = 64, .bias = true});
  linear.set_init("weight", Init::constant(0.25));
  phalanx::nn::initialise(linear, 1);
  EXPECT_TRUE(at::equal(linear.weight, at::full({64, 64}, 0.25)));
  EXPECT_TRUE(at::equal(linear.bias, at::zeros({64})));
  EXPECT_THROW(linear.set_init("wieght", Init::constant(0.0)), phalanx::Error);
}

/// A module of plain libtorch, which makes no statement.
struct Foreign : torch::nn::Module {
  Foreign() {
    register_parameter("weight", at::empty({32, 16}));
    register_parameter("bias", at::empty({32}));
  }
};

TEST(Module, ParametersOfPlainModulesStartAsTorchsDo) {
  Foreign foreign;
  phalanx::nn::initialise(foreign, 1);
  const auto weight = foreign.named_parameters()["weight"];
  EXPECT_LE(weight.abs().max().item<double>(), 0.25);  // 1 / sqrt(16)
  EXPECT_GT(weight.abs().max().item<double>(), 0.2);
  EXPECT_TRUE(at::equal(foreign.named_parameters()["bias"], at::zeros({32})));
}

TEST(KvCache, PaddingIsOverwrittenAndTruncateForgets) {
  KvCache cache({.layers = 1, .batch = 2, .kv_heads = 1, .max_len = 6, .head_dim = 1});
  const auto value = [](double v, std::int64_t n) { return at::full({2, 1, n, 1}, v); };
  cache.begin(3, {3, 1});
  cache.append(0, value(1, 3), value(1, 3));
  cache.finish();
  EXPECT_FALSE(cache.uniform());
  cache.begin(1);
  ASSERT_TRUE(cache.positions().defined());
  EXPECT_EQ(cache.positions()[1][0].item<std::int64_t>(), 1);
  const auto [keys, values] = cache.append(0, value(2, 1), value(2, 1));
  EXPECT_EQ(keys.size(2), 4);
  EXPECT_EQ(keys[1][0][1][0].item<double>(), 2.0);  // where row 1's padding was
  EXPECT_EQ(values[0][0][3][0].item<double>(), 2.0);
  // Row 1 has two tokens now: its query may not see what lies behind them.
  EXPECT_FALSE(cache.mask()[1][0][0][2].item<bool>());
  EXPECT_TRUE(cache.mask()[0][0][0][3].item<bool>());
  cache.finish();
  cache.truncate(1);
  EXPECT_THAT(cache.lengths(), ElementsAre(1, 1));
  EXPECT_THROW(cache.truncate(0, 2), phalanx::Error);
  cache.reset();
  EXPECT_EQ(cache.longest(), 0);
}

TEST(KvCache, WrongCountsAreErrors) {
  KvCache cache({.layers = 1, .batch = 2, .kv_heads = 1, .max_len = 6, .head_dim = 1});
  EXPECT_THROW(cache.begin(2, {1}), phalanx::Error);
  EXPECT_THROW(cache.begin(2, {3, 1}), phalanx::Error);
  EXPECT_THROW(cache.begin(7), phalanx::Error);
}

TEST(Rotary, ScoresDependOnTheDistanceAlone) {
  const auto all = phalanx::nn::rotary_tables(8, 32, 10000.0);
  const at::Tensor q = at::randn({1, 1, 1, 8}), k = at::randn({1, 1, 1, 8});
  const auto turned = [&](const at::Tensor& x, std::int64_t position) {
    const auto tables = all.narrow(position, 1);
    return phalanx::kernels::apply_rotary(x, tables.cos, tables.sin);
  };
  const double near = (turned(q, 5) * turned(k, 2)).sum().item<double>();
  EXPECT_NEAR((turned(q, 25) * turned(k, 22)).sum().item<double>(), near, 1e-5);
  EXPECT_GT(std::abs((turned(q, 25) * turned(k, 2)).sum().item<double>() - near), 1e-3);
}

TEST(Rotary, TablesHoldTheAnglesOfPositionAndPair) {
  const auto tables = phalanx::nn::rotary_tables(8, 32, 10000.0);
  EXPECT_EQ(tables.cos.size(1), 4);
  // Position 0 turns by nothing, position p by p radians in the first pair.
  EXPECT_EQ(tables.cos[0][0].item<double>(), 1.0);
  EXPECT_NEAR(tables.sin[3][0].item<double>(), std::sin(3.0), 1e-6);
  EXPECT_NEAR(tables.sin[3][1].item<double>(), std::sin(3.0 * std::pow(10000.0, -0.25)), 1e-6);
}

TEST(RMSNorm, ScalesRowsToUnitMeanSquare) {
  phalanx::nn::RMSNorm norm(16, 0.0);
  phalanx::nn::initialise(norm, 1);
  const at::Tensor y = call(norm, at::randn({5, 16}) * 7.0);
  EXPECT_TRUE(at::allclose((y * y).mean(-1), at::full({5}, 1.0)));
}

}  // namespace
