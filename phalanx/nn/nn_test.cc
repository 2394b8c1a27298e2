#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/rotary.h"
#include "phalanx/nn/attention.h"
#include "phalanx/nn/feed_forward.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/kv_cache.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/rms_norm.h"
#include "phalanx/nn/rotary.h"
#include "phalanx/nn/transformer_block.h"

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
  const auto rope = phalanx::nn::rotary_tables({.head_dim = 4, .theta = 10000.0}, 5);
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

/// A plain libtorch module, which declares no initial values.
struct Foreign : torch::nn::Module {
  Foreign() {
    register_parameter("weight", at::empty({32, 16}));
    register_parameter("bias", at::empty({32}));
    norm = register_module("norm", std::make_shared<torch::nn::Module>("norm"));
    norm->register_parameter("weight", at::empty({16}));
  }
  std::shared_ptr<torch::nn::Module> norm;
};

TEST(Module, ParametersOfPlainModulesStartAsTorchsDo) {
  Foreign foreign;
  phalanx::nn::initialise(foreign, 1);
  const auto weight = foreign.named_parameters()["weight"];
  EXPECT_LE(weight.abs().max().item<double>(), 0.25);  // 1 / sqrt(16)
  EXPECT_GT(weight.abs().max().item<double>(), 0.2);
  EXPECT_TRUE(at::equal(foreign.named_parameters()["bias"], at::zeros({32})));
  EXPECT_TRUE(at::equal(foreign.norm->named_parameters()["weight"], at::ones({16})));
}

/// One matrix under two names.
struct Tied : torch::nn::Module {
  Tied() {
    first = register_module("first", std::make_shared<Linear>(phalanx::nn::LinearOptions{8, 8}));
    second = register_module("second", std::make_shared<torch::nn::Module>("second"));
    second->register_parameter("weight", first->weight);
  }
  std::shared_ptr<Linear> first;
  std::shared_ptr<torch::nn::Module> second;
};

TEST(Module, ATiedParameterIsNamedAndFilledOnceByItsFirstOwner) {
  Tied tied;
  const auto parameters = phalanx::nn::named_parameters(tied);
  ASSERT_EQ(parameters.size(), 1U);
  EXPECT_EQ(parameters[0].name, "first.weight");
  const auto inits = phalanx::nn::parameter_inits(tied);
  ASSERT_EQ(inits.size(), 1U);
  EXPECT_EQ(inits[0].name, "first.weight");
  phalanx::nn::initialise(tied, 3);
  const at::Tensor expected = at::empty({8, 8});
  phalanx::fill(expected, Init::normal(0.0, 0.02), 3, "first.weight");
  EXPECT_TRUE(at::equal(tied.first->weight, expected));
  phalanx::nn::initialise(tied, 4);
  EXPECT_FALSE(at::equal(tied.first->weight, expected));
}

TEST(Linear, AddsItsBias) {
  Linear linear({.in_features = 3, .out_features = 2, .bias = true});
  phalanx::nn::initialise(linear, 1);
  const at::Tensor x = at::randn({4, 3}), without = call(linear, x);
  const at::NoGradGuard no_grad;
  linear.bias.copy_(at::tensor({1.0f, -2.0f}));
  EXPECT_TRUE(at::allclose(call(linear, x), without + at::tensor({1.0f, -2.0f})));
}

TEST(FeedForward, IsItsFormulaAndHooksOnAnyProjectionAreCalled) {
  phalanx::nn::FeedForward layer(6, 10);
  phalanx::nn::initialise(layer, 1);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : layer.parameters()) parameter.mul_(30.0);
  const at::Tensor x = at::randn({2, 3, 6});
  const at::Tensor expected =
      at::linear(at::silu(at::linear(x, layer.w1->weight)) * at::linear(x, layer.w3->weight), layer.w2->weight);
  EXPECT_TRUE(at::allclose(call(layer, x), expected, 1e-4, 1e-6));
  for (const auto& projection : {layer.w1, layer.w2, layer.w3}) {
    phalanx::nn::FeedForward hooked(6, 10);
    phalanx::nn::initialise(hooked, 1);
    for (const auto& parameter : hooked.parameters()) parameter.mul_(30.0);
    int calls = 0;
    const auto hook = [&](Module&) { ++calls; };
    (projection == layer.w1 ? hooked.w1 : projection == layer.w2 ? hooked.w2 : hooked.w3)->add_pre_forward_hook(hook);
    EXPECT_TRUE(at::allclose(call(hooked, x), expected, 1e-4, 1e-6));
    EXPECT_EQ(calls, 1);
  }
}

/// softmax(q k^T / sqrt(d) + causal mask) v, head by head, position by position.
at::Tensor attention_by_hand(phalanx::nn::Attention& attention, const at::Tensor& x,
                             const phalanx::nn::RotaryTables& rope, std::int64_t heads, std::int64_t kv_heads) {
  const std::int64_t batch = x.size(0), seq = x.size(1);
  const auto split = [&](const Linear& linear) {
    return at::linear(x, linear.weight).view({batch, seq, -1, attention.wo->weight.size(1) / heads}).transpose(1, 2);
  };
  const auto turned = [&](const at::Tensor& t) {
    const std::int64_t half = t.size(-1) / 2;
    const at::Tensor a = t.narrow(-1, 0, half), b = t.narrow(-1, half, half);
    return at::cat({a * rope.cos - b * rope.sin, b * rope.cos + a * rope.sin}, -1);
  };
  const at::Tensor q = turned(split(*attention.wq)), k = turned(split(*attention.wk)), v = split(*attention.wv);
  const at::Tensor hidden = at::ones({seq, seq}).tril().eq(0);
  std::vector<at::Tensor> outputs;
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t shared = h / (heads / kv_heads);
    const at::Tensor scores =
        at::matmul(q.select(1, h), k.select(1, shared).transpose(1, 2)) / std::sqrt(static_cast<double>(q.size(-1)));
    const at::Tensor weights = at::softmax(scores.masked_fill(hidden, -INFINITY), -1);
    outputs.push_back(at::matmul(weights, v.select(1, shared)));
  }
  return at::linear(at::cat(outputs, -1), attention.wo->weight);  // [batch, seq, heads * head_dim] in order of heads
}

TEST(Attention, EqualsItsFormulaWithAndWithoutACache) {
  phalanx::nn::Attention attention({.dim = 16, .n_heads = 4, .n_kv_heads = 2, .head_dim = 6});
  phalanx::nn::initialise(attention, 1);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : attention.parameters()) parameter.mul_(30.0);
  const at::Tensor x = at::randn({2, 7, 16});
  const auto rope = phalanx::nn::rotary_tables({.head_dim = 6, .theta = 100.0}, 7);
  const at::Tensor expected = attention_by_hand(attention, x, rope, 4, 2);
  EXPECT_TRUE(at::allclose(call(attention, x, rope), expected, 1e-4, 1e-5));

  KvCache cache({.layers = 1, .batch = 2, .kv_heads = 2, .max_len = 7, .head_dim = 6});
  std::int64_t seen = 0;
  for (const std::int64_t n : {3, 1, 2, 1}) {  // a prompt, one token, several behind others, one that fills it
    cache.begin(n);
    const at::Tensor y = call(attention, x.narrow(1, seen, n), rope.narrow(seen, n), cache, 0);
    cache.finish();
    EXPECT_TRUE(at::allclose(y, expected.narrow(1, seen, n), 1e-4, 1e-5)) << seen;
    seen += n;
  }
}

TEST(TransformerBlock, AddsAttentionAndFeedForwardEachBehindItsNorm) {
  phalanx::nn::TransformerBlock block(
      {.attention = {.dim = 8, .n_heads = 2, .n_kv_heads = 1, .head_dim = 4}, .ffn_hidden = 12, .norm_eps = 0.5});
  phalanx::nn::initialise(block, 1);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : block.parameters()) {
    if (parameter.dim() == 1) {
      parameter.copy_(at::randn({8}));
    } else {
      parameter.mul_(30.0);
    }
  }
  const at::Tensor x = at::randn({2, 5, 8});
  const auto rope = phalanx::nn::rotary_tables({.head_dim = 4, .theta = 100.0}, 5);
  const auto normed = [](const at::Tensor& t, const at::Tensor& weight) {
    return t / ((t * t).mean(-1, /*keepdim=*/true) + 0.5).sqrt() * weight;
  };
  const at::Tensor middle = x + call(block.attention, normed(x, block.attention_norm->weight), rope);
  const at::Tensor expected = middle + call(block.feed_forward, normed(middle, block.ffn_norm->weight));
  EXPECT_TRUE(at::allclose(call(block, x, rope), expected, 1e-4, 1e-5));
  KvCache cache({.layers = 1, .batch = 2, .kv_heads = 1, .max_len = 5, .head_dim = 4});
  cache.begin(5);
  EXPECT_TRUE(at::allclose(call(block, x, rope, cache, 0), expected, 1e-4, 1e-5));
}

TEST(KvCache, PaddingIsOverwrittenAndTruncateForgets) {
  KvCache cache({.layers = 1, .batch = 2, .kv_heads = 1, .max_len = 6, .head_dim = 1});
  const auto value = [](double v, std::int64_t n) { return at::full({2, 1, n, 1}, v); };
  cache.begin(3, {3, 1});
  cache.append(0, value(1, 3), value(1, 3));
  cache.finish();
  cache.begin(1);
  ASSERT_TRUE(cache.positions().defined());
  EXPECT_EQ(cache.positions()[1][0].item<std::int64_t>(), 1);
  const auto [keys, values] = cache.append(0, value(2, 1), value(2, 1));
  EXPECT_EQ(keys.size(2), 4);
  EXPECT_EQ(keys[1][0][1][0].item<double>(), 2.0);  // where row 1's padding was
  EXPECT_EQ(values[0][0][3][0].item<double>(), 2.0);
  // Row 1 now has two tokens: its query may not see what is behind them.
  EXPECT_FALSE(cache.mask()[1][0][0][2].item<bool>());
  EXPECT_TRUE(cache.mask()[0][0][0][3].item<bool>());
  cache.finish();
  cache.truncate(1);
  EXPECT_THAT(cache.lengths(), ElementsAre(1, 1));
  EXPECT_THROW(cache.truncate(0, 2), phalanx::Error);
  cache.truncate(5);  // longer than any row: nothing to forget
  EXPECT_THAT(cache.lengths(), ElementsAre(1, 1));
  cache.reset();
  EXPECT_EQ(cache.longest(), 0);
}

TEST(KvCache, EqualRowsGoOnWhereTheyEndedAndFillTheLastPosition) {
  KvCache cache({.layers = 2, .batch = 2, .kv_heads = 1, .max_len = 4, .head_dim = 3});
  EXPECT_EQ(cache.bytes(), 2 * 2 * 2 * 4 * 3 * 4);  // keys and values, layers, rows, positions, elements, fp32
  const at::Tensor k = at::randn({2, 1, 4, 3}), v = at::randn({2, 1, 4, 3});
  for (const auto& [first, count] : {std::pair{0, 1}, {1, 2}, {3, 1}}) {
    cache.begin(count);
    for (const int layer : {0, 1}) {
      const auto [keys, values] = cache.append(layer, k.narrow(2, first, count) + layer, v.narrow(2, first, count));
      EXPECT_TRUE(at::equal(keys, k.narrow(2, 0, first + count) + layer));
      EXPECT_TRUE(at::equal(values, v.narrow(2, 0, first + count)));
    }
    cache.finish();
  }
  EXPECT_THROW(cache.begin(1), phalanx::Error);
}

TEST(KvCache, WrongCountsAreErrors) {
  KvCache cache({.layers = 1, .batch = 2, .kv_heads = 1, .max_len = 6, .head_dim = 1});
  EXPECT_THROW(cache.begin(2, {1, 1, 1}), phalanx::Error);
  EXPECT_THROW(cache.begin(1, {1, 1}, 1), phalanx::Error);
  EXPECT_THROW(cache.begin(2, {3, 1}), phalanx::Error);
  EXPECT_THROW(cache.begin(7), phalanx::Error);
}

TEST(Rotary, ScoresDependOnTheDistanceAlone) {
  const auto all = phalanx::nn::rotary_tables({.head_dim = 8, .theta = 10000.0}, 32);
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
  const auto tables = phalanx::nn::rotary_tables({.head_dim = 8, .theta = 10000.0}, 32);
  EXPECT_EQ(tables.cos.size(1), 4);
  // Position 0 is not rotated, position p is rotated by p radians in the first pair.
  EXPECT_EQ(tables.cos[0][0].item<double>(), 1.0);
  EXPECT_NEAR(tables.sin[3][0].item<double>(), std::sin(3.0), 1e-6);
  EXPECT_NEAR(tables.sin[3][1].item<double>(), std::sin(3.0 * std::pow(10000.0, -0.25)), 1e-6);
}

TEST(Rotary, TablesOfPositionsAreRowsOfTheTables) {
  const auto all = phalanx::nn::rotary_tables({.head_dim = 8, .theta = 10000.0}, 32);
  const auto some = all.at_positions(at::tensor({3, 30, 0, 7}, at::TensorOptions(at::kLong)).view({2, 2}));
  EXPECT_EQ(some.cos.sizes(), (std::vector<std::int64_t>{2, 2, 4}));
  EXPECT_TRUE(at::equal(some.cos[0][1], all.cos[30]));
  EXPECT_TRUE(at::equal(some.sin[0][1], all.sin[30]));
  EXPECT_TRUE(at::equal(some.sin[1][1], all.sin[7]));
}

TEST(RMSNorm, AddsEpsUnderTheRoot) {
  phalanx::nn::RMSNorm norm(2, 0.75);
  phalanx::nn::initialise(norm, 1);
  EXPECT_TRUE(at::allclose(call(norm, at::full({2}, 0.5)), at::full({2}, 0.5)));  // sqrt(0.25 + 0.75) = 1
}

TEST(RMSNorm, ScalesRowsToUnitMeanSquare) {
  phalanx::nn::RMSNorm norm(16, 0.0);
  phalanx::nn::initialise(norm, 1);
  const at::Tensor y = call(norm, at::randn({5, 16}) * 7.0);
  EXPECT_TRUE(at::allclose((y * y).mean(-1), at::full({5}, 1.0)));
}

}  // namespace
