// Adapters compute what the plain formula says, and what a model with merged weights computes.
#include "phalanx/models/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/remainder.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/nn/init.h"

namespace phalanx::models {
namespace lora_test {

LlamaConfig small() {
  return {
      .dim = 32, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_hidden = 48, .vocab_size = 64, .max_seq_len = 8};
}

at::Tensor tokens(std::int64_t rows, std::int64_t seq) {
  return at::remainder(at::arange(rows * seq, at::kLong).mul(7), 61).view({rows, seq});
}

at::Tensor input() { return at::arange(24, at::TensorOptions(at::kFloat)).view({2, 3, 4}).sin(); }

// The first parameter of a stage is a matrix in 4 bits.
TEST(Lora, HiddenStatesAreNotOfTheTypeOfABaseInFourBits) {
  LlamaConfig config = small();
  config.dim = 64;
  config.ffn_hidden = 128;
  const LoraOptions options{.rank = 2, .target_modules = {"layers.0.*"}, .base_dtype = "nf4"};
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const LlamaPart& part :
         {LlamaPart{.begin = 0, .end = 2, .embedding = true}, LlamaPart{.begin = 2, .end = 4}}) {
      Llama stage(config, part, {.dtype = type});
      add_lora(stage, options, type);
      store_in_nf4(stage, options);
      stage.set_activation_dtype(type);
      EXPECT_EQ(stage.activations().dtype().toScalarType(), type) << part.text();
      EXPECT_EQ(stage.make_cache(1, 8).options().dtype, type) << part.text();
    }
  }
}

TEST(LoraLinear, IsTheFormula) {
  for (const bool bias : {false, true}) {
    nn::Linear linear({.in_features = 4, .out_features = 5, .bias = bias});
    linear.add_adapter({.rank = 2, .scale = 1.5, .b = Init::normal(0.0, 1.0)});
    nn::initialise(linear, 1);
    EXPECT_LE(linear.lora_a.abs().max().item<double>(), 0.5);  // 1 / sqrt(in)
    EXPECT_GT(linear.lora_a.abs().max().item<double>(), 0.2);
    const at::Tensor x = input().requires_grad_(), same = input().requires_grad_();
    at::Tensor expected = at::matmul(same, linear.weight.detach().t()) +
                          at::matmul(at::matmul(same, linear.lora_a.t()), linear.lora_b.t()) * 1.5;
    if (bias) expected = expected + linear.bias.detach();
    const at::Tensor y = nn::call(linear, x);
    EXPECT_TRUE(at::allclose(y, expected, 1e-6, 1e-6));
    y.sin().sum().backward();
    std::vector<at::Tensor> gradients;
    for (at::Tensor& p : std::vector{linear.lora_a, linear.lora_b}) {
      gradients.push_back(std::exchange(p.mutable_grad(), at::Tensor()));
    }
    expected.sin().sum().backward();
    EXPECT_TRUE(at::allclose(x.grad(), same.grad(), 1e-6, 1e-6));
    EXPECT_TRUE(at::allclose(gradients[0], linear.lora_a.grad(), 1e-6, 1e-6));
    EXPECT_TRUE(at::allclose(gradients[1], linear.lora_b.grad(), 1e-6, 1e-6));
  }
}

TEST(LoraLinear, AddsNothingAtFirst) {
  nn::Linear linear({.in_features = 4, .out_features = 5});
  linear.add_adapter({.rank = 2});
  nn::initialise(linear, 1);
  EXPECT_TRUE(at::equal(nn::call(linear, input()), at::matmul(input(), linear.weight.t())));
}

TEST(LoraLinear, DropsOutOfTheAdaptersInputAloneAndNotInEvaluation) {
  nn::Linear linear({.in_features = 4, .out_features = 5});
  linear.add_adapter({.rank = 2, .scale = 1.0, .dropout = 0.5, .b = Init::normal(0.0, 1.0)});
  nn::initialise(linear, 1);
  nn::set_dropout_rng_state(linear, {.seed = 1});
  const at::Tensor plain = at::matmul(input(), linear.weight.t());
  const auto added = [&](const at::Tensor& x) {
    return at::matmul(at::matmul(x, linear.lora_a.t()), linear.lora_b.t());
  };
  nn::Dropout same(0.5);
  same.rng_state("lora_dropout", {.seed = 1});
  const at::Tensor dropped = nn::call(same, input());
  EXPECT_FALSE(at::equal(dropped, input()));
  EXPECT_TRUE(at::allclose(nn::call(linear, input()), plain + added(dropped), 1e-6, 1e-6));
  linear.eval();
  EXPECT_TRUE(at::allclose(nn::call(linear, input()), plain + added(input()), 1e-6, 1e-6));
}

TEST(LoraLinear, WrongUseIsRefused) {
  nn::Linear linear({.in_features = 4, .out_features = 5});
  EXPECT_THAT(error_text<ConfigError>([&] { linear.add_adapter({.rank = 0}); }), HasSubstr("rank is 0"));
  linear.add_adapter({.rank = 1});
  EXPECT_THAT(error_text<Error>([&] { linear.add_adapter({.rank = 1}); }), HasSubstr("has one already"));
}

TEST(Lora, AModelWithMergedWeightsComputesTheSame) {
  const LlamaConfig config = small();
  Llama adapted(config), merged(config);
  const LoraOptions options{.rank = 3, .alpha = 6, .target_modules = {"all-linear"}, .zero_b = false};
  add_lora(adapted, options);
  nn::initialise(adapted, 7);
  nn::initialise(merged, 7);
  const at::Tensor labels = tokens(2, 8).roll(-1, 1);
  EXPECT_FALSE(at::allclose(adapted.forward(tokens(2, 8)), merged.forward(tokens(2, 8)), 1e-3, 1e-3));
  std::map<std::string, at::Tensor> parameters;
  for (const NamedTensor& p : nn::named_parameters(adapted)) parameters[p.name] = p.tensor;
  std::size_t layers = 0;
  {
    const at::NoGradGuard no_grad;
    for (const NamedTensor& p : nn::named_parameters(merged)) {
      const std::string layer = p.name.substr(0, p.name.rfind('.'));
      if (!parameters.contains(layer + kLoraA)) continue;
      p.tensor.add_(at::matmul(parameters[layer + kLoraB], parameters[layer + kLoraA]), options.scale());
      ++layers;
    }
  }
  EXPECT_EQ(layers, 14U);
  EXPECT_TRUE(at::allclose(adapted.forward(tokens(2, 8)), merged.forward(tokens(2, 8)), 1e-4, 1e-5));
  EXPECT_NEAR(adapted.loss(tokens(2, 8), labels).item<double>(), merged.loss(tokens(2, 8), labels).item<double>(),
              1e-5);
  nn::KvCache cache = adapted.make_cache(2, 8), other = merged.make_cache(2, 8);
  EXPECT_TRUE(at::allclose(adapted.forward(tokens(2, 4), cache), merged.forward(tokens(2, 4), other), 1e-4, 1e-5));
  EXPECT_TRUE(at::allclose(adapted.forward(tokens(2, 1), cache), merged.forward(tokens(2, 1), other), 1e-4, 1e-5));
}

TEST(Lora, APartOfAModelHasTheAdaptersOfItsLayersWithTheSameValues) {
  const LlamaConfig config = small();
  const LoraOptions options{.rank = 2, .target_modules = {"q_proj", "down_proj"}};
  Llama whole(config), part(config, LlamaPart{.begin = 2, .end = 4, .head = true});
  add_lora(whole, options);
  add_lora(part, options);
  nn::initialise(whole, 3);
  nn::initialise(part, 3);
  std::map<std::string, at::Tensor> all;
  for (const NamedTensor& p : nn::named_parameters(whole)) all[p.name] = p.tensor;
  std::vector<std::string> adapters;
  for (const NamedTensor& p : nn::named_parameters(part)) {
    EXPECT_TRUE(at::equal(p.tensor, all.at(p.name))) << p.name;
    if (is_lora_name(p.name)) adapters.push_back(p.name);
  }
  EXPECT_THAT(adapters, UnorderedElementsAre("layers.1.attention.wq.lora_A", "layers.1.attention.wq.lora_B",
                                             "layers.1.feed_forward.w2.lora_A", "layers.1.feed_forward.w2.lora_B"));
}

}  // namespace lora_test
}  // namespace phalanx::models
