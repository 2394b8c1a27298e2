// The layers that only families other than Llama use: LayerNorm, the GELU net, the mixture of experts.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/layer_norm.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/nn/mlp.h"
#include "phalanx/nn/rotary.h"
#include "phalanx/nn/transformer_block.h"

namespace phalanx::nn {
namespace {

void scramble(Module& module) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : module.parameters()) parameter.copy_(at::randn(parameter.sizes()));
}

// A sum of 4,096 equal contributions in 16 bits would stop growing on the way.
TEST(LayerNormTest, GradientsOfManyRowsAreSumsInFloat32) {
  constexpr std::int64_t kRows = 4096;
  LayerNorm norm(2, 1e-5);
  initialise(norm, 1);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    norm.to(type);
    norm.zero_grad();
    const at::Tensor x = at::ones({kRows, 2}, type);
    x.select(1, 1).fill_(-1);
    call(norm, x).backward(at::full({kRows, 2}, 1.0 / 128, type));
    EXPECT_EQ(norm.bias.grad()[0].item<double>(), kRows / 128) << type;
    EXPECT_NEAR(norm.weight.grad()[0].item<double>(), kRows / 128, 0.25) << type;
  }
}

TEST(LayerNormTest, TakesMeanAndVarianceOff) {
  LayerNorm norm(6, 0.25);
  initialise(norm, 1);
  EXPECT_TRUE(at::equal(norm.weight, at::ones({6})));
  EXPECT_TRUE(at::equal(norm.bias, at::zeros({6})));
  EXPECT_EQ(norm.eps(), 0.25);
  scramble(norm);
  const at::Tensor x = at::randn({3, 4, 6}) + 2.0;
  const at::Tensor off = x - x.mean(-1, /*keepdim=*/true);
  const at::Tensor expected = off / ((off * off).mean(-1, /*keepdim=*/true) + 0.25).sqrt() * norm.weight + norm.bias;
  EXPECT_TRUE(at::allclose(call(norm, x), expected, 1e-5, 1e-5));
}

TEST(MlpTest, IsGeluInItsTanhFormBetweenTwoProductsWithBiases) {
  Mlp net(4, 10);
  scramble(net);
  const at::Tensor x = at::randn({2, 3, 4});
  const at::Tensor h = at::matmul(x, net.w1->weight.t()) + net.w1->bias;
  const at::Tensor gelu = h * 0.5 * (at::tanh((h + h * h * h * 0.044715) * std::sqrt(2.0 / M_PI)) + 1.0);
  EXPECT_TRUE(at::allclose(call(net, x), at::matmul(gelu, net.w2->weight.t()) + net.w2->bias, 1e-4, 1e-4));
}

// The results of the two likeliest experts, weighted by their share.
at::Tensor by_all_experts(const MixtureOfExperts& mixture, const at::Tensor& x) {
  const at::Tensor p = at::softmax(at::matmul(x, mixture.gate->weight.t()), -1);
  const at::Tensor second = std::get<0>(p.sort(-1, /*descending=*/true)).narrow(-1, 1, 1);
  const at::Tensor kept = p * (p >= second);
  const at::Tensor shares = kept / kept.sum(-1, /*keepdim=*/true);
  at::Tensor y = at::zeros_like(x);
  for (std::int64_t e = 0; e < mixture.options().experts; ++e) {
    const auto& expert = *mixture.experts->nets().at(e);
    const at::Tensor h = at::silu(at::matmul(x, expert.w1->weight.t())) * at::matmul(x, expert.w3->weight.t());
    y = y + at::matmul(h, expert.w2->weight.t()) * shares.narrow(-1, e, 1);
  }
  return y;
}

TEST(MixtureOfExpertsTest, IsTheWeightedSumOfTheLikeliestExperts) {
  MixtureOfExperts mixture({.dim = 4, .hidden = 6, .experts = 5, .experts_per_token = 2});
  scramble(mixture);
  const at::Tensor x = at::randn({2, 7, 4}).requires_grad_(), dy = at::randn({2, 7, 4});
  const auto gradients = [&](const at::Tensor& y) {
    y.backward(dy);
    std::vector<at::Tensor> result = {x.grad().clone()};
    x.mutable_grad().reset();
    for (const auto& parameter : mixture.parameters()) {
      result.push_back(parameter.grad().clone());
      parameter.mutable_grad().reset();
    }
    return result;
  };
  const at::Tensor expected = by_all_experts(mixture, x), found = call(mixture, x);
  EXPECT_TRUE(at::allclose(found, expected, 1e-4, 1e-5));
  const auto wanted = gradients(expected), made = gradients(found);
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::allclose(made[i], wanted[i], 1e-4, 1e-4)) << i;
  const c10::InferenceMode inference;
  EXPECT_TRUE(at::allclose(call(mixture, x), found, 1e-5, 1e-6));
  EXPECT_EQ(mixture.last_projections().size(), 5U);
}

// The loss written out, for three sequences of five tokens.
TEST(MixtureOfExpertsTest, TheGradientOfAnEvenLoadIsThatOfTheLossPerSequence) {
  constexpr std::int64_t kSequences = 3, kTokens = 5, kExperts = 4, kEach = 2;
  MixtureOfExperts mixture({.dim = 4, .hidden = 6, .experts = kExperts, .experts_per_token = kEach});
  scramble(mixture);
  const at::Tensor x = at::randn({kSequences, kTokens, 4}).requires_grad_();
  const auto gradients = [&] {
    const std::vector<at::Tensor> all = {x.grad().clone(), mixture.gate->weight.grad().clone()};
    x.mutable_grad().reset();
    mixture.zero_grad();
    return all;
  };
  const at::Tensor p = at::softmax(at::linear(x, mixture.gate->weight), -1);
  const at::Tensor chosen = std::get<1>(at::topk(p, kEach, -1));
  at::Tensor loss = call(mixture, x).sum();
  for (std::int64_t s = 0; s < kSequences; ++s) {
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const double share = (chosen[s] == e).sum().item<double>() / static_cast<double>(kTokens * kEach);
      loss = loss + p[s].select(-1, e).mean() * (0.3 * kExperts * share);
    }
  }
  loss.mul(7).backward();
  const std::vector<at::Tensor> expected = gradients();
  mixture.set_losses({.load_weight = 0.3, .loss_scale = at::full({}, 7.0, at::kDouble)});
  call(mixture, x).sum().mul(7).backward();
  const std::vector<at::Tensor> found = gradients();
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-4, 1e-5)) << i;
  mixture.eval();
  call(mixture, x).sum().mul(7).backward();
  EXPECT_FALSE(at::allclose(gradients()[1], expected[1], 1e-4, 1e-5));
  mixture.train();
  EXPECT_THROW(call(mixture, x.flatten(0, 1)), Error);
}

TEST(MixtureOfExpertsTest, TheGradientOfTheZLossIsThatOfItsFormula) {
  MixtureOfExperts mixture({.dim = 4, .hidden = 6, .experts = 5, .experts_per_token = 2});
  scramble(mixture);
  const at::Tensor x = at::randn({2, 3, 4}).requires_grad_();
  const auto gradients = [&](const at::Tensor& loss) {
    loss.backward();
    const std::vector<at::Tensor> all = {x.grad().clone(), mixture.gate->weight.grad().clone()};
    x.mutable_grad().reset();
    mixture.zero_grad();
    return all;
  };
  const auto z = [&] { return at::logsumexp(at::linear(x, mixture.gate->weight), -1).square().sum(); };
  const std::vector<at::Tensor> expected = gradients((call(mixture, x).sum() + 0.2 * z()) * 7);
  mixture.set_losses({.z_weight = 0.2, .loss_scale = at::full({}, 7.0, at::kDouble)});
  const std::vector<at::Tensor> found = gradients(call(mixture, x).sum() * 7);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-4, 1e-5)) << i;
  mixture.eval();
  EXPECT_FALSE(at::allclose(gradients(call(mixture, x).sum() * 7)[1], expected[1], 1e-4, 1e-5));
}

// Of five experts a bias has the two unlikeliest chosen; their weights are those of the probabilities.
TEST(MixtureOfExpertsTest, ABiasChoosesAndDoesNotWeigh) {
  MixtureOfExperts mixture({.dim = 4, .hidden = 6, .experts = 5, .experts_per_token = 2});
  scramble(mixture);
  const at::Tensor x = at::randn({1, 4});
  const at::Tensor p = at::softmax(at::linear(x, mixture.gate->weight), -1)[0];
  const at::Tensor order = at::argsort(p);
  const at::Tensor bias = at::zeros({5}), counts = at::zeros({5}, at::kLong);
  at::Tensor expected = at::zeros({1, 4});
  double sum = 0;
  for (int i = 0; i < 2; ++i) {
    const auto e = order[i].item<std::int64_t>();
    bias[e].fill_(1);
    const auto& net = *mixture.experts->nets().at(e);
    const at::Tensor h = at::silu(at::linear(x, net.w1->weight)) * at::linear(x, net.w3->weight);
    expected = expected + at::linear(h, net.w2->weight) * p[e];
    sum += p[e].item<double>();
  }
  const at::Tensor without = call(mixture, x);
  mixture.set_tensors({.bias = bias, .counts = counts});
  EXPECT_TRUE(at::allclose(call(mixture, x), expected / sum, 1e-4, 1e-5));
  EXPECT_FALSE(at::allclose(without, expected / sum, 1e-2, 1e-2));
  EXPECT_TRUE(at::equal(counts, bias.to(at::kLong)));
  bias.zero_();  // it is read in every pass
  EXPECT_TRUE(at::equal(call(mixture, x), without));
}

TEST(MixtureOfExpertsTest, TrainingPassesCountATokenOnce) {
  MixtureOfExperts mixture({.dim = 4, .hidden = 6, .experts = 5, .experts_per_token = 2});
  scramble(mixture);
  const at::Tensor x = at::randn({2, 3, 4}).requires_grad_(), counts = at::zeros({5}, at::kLong);
  mixture.set_tensors({.bias = {}, .counts = counts});
  const at::Tensor chosen = std::get<1>(at::topk(at::linear(x, mixture.gate->weight), 2));
  const at::Tensor expected = at::bincount(chosen.flatten(), {}, 5);
  {
    const at::NoGradGuard no_grad;  // as the first time where a block is computed again
    call(mixture, x);
  }
  call(mixture, x).sum().backward();
  EXPECT_TRUE(at::equal(counts, expected));
  mixture.eval();
  call(mixture, x);
  EXPECT_TRUE(at::equal(counts, expected));
}

// DDP and FSDP wait for all gradients, so every expert must get one.
TEST(MixtureOfExpertsTest, AnExpertWithoutATokenHasAGradientOfZeros) {
  MixtureOfExperts mixture({.dim = 4, .hidden = 6, .experts = 8, .experts_per_token = 2});
  scramble(mixture);
  const at::Tensor one = at::randn({1, 1, 4});  // goes to two of eight
  call(mixture, one).sum().backward();
  int without = 0;
  for (const auto& [number, expert] : mixture.experts->nets()) {
    for (const auto& parameter : expert->parameters()) ASSERT_TRUE(parameter.grad().defined());
    if (expert->w2->weight.grad().abs().max().item<float>() == 0.0F) ++without;
  }
  EXPECT_EQ(without, 6);
}

TEST(TransformerBlockTest, OtherKindsHaveOtherParts) {
  TransformerBlockOptions options{.attention = {.dim = 8,
                                                .n_heads = 2,
                                                .n_kv_heads = 2,
                                                .head_dim = 4,
                                                .qkv_bias = true,
                                                .output_bias = true,
                                                .rotary = false},
                                  .ffn_hidden = 12,
                                  .positionwise = PositionwiseKind::gelu,
                                  .norm = NormKind::layer};
  TransformerBlock gelu(options);
  scramble(gelu);
  const at::Tensor x = at::randn({2, 5, 8});
  const at::Tensor middle = x + call(gelu.attention, call(gelu.attention_norm, x), RotaryTables());
  const at::Tensor expected = middle + call(gelu.feed_forward, call(gelu.ffn_norm, middle));
  EXPECT_TRUE(at::allclose(call(gelu, x, RotaryTables()), expected, 1e-5, 1e-5));
  std::vector<std::string> names;
  for (const auto& parameter : gelu.named_parameters()) names.push_back(parameter.key());
  EXPECT_THAT(names, testing::IsSupersetOf({"attention.wo.bias", "attention.wk.bias", "attention_norm.bias",
                                            "ffn_norm.bias", "feed_forward.w1.bias", "feed_forward.w2.bias"}));
  EXPECT_EQ(names.size(), 16U);
  options.positionwise = PositionwiseKind::experts;
  options.mixture = {.dim = 8, .hidden = 12, .experts = 3, .experts_per_token = 1, .shared_hidden = 6};
  const TransformerBlock experts(options);
  EXPECT_TRUE(experts.named_parameters().contains("moe.shared_experts.w2.weight"));
  EXPECT_TRUE(experts.named_parameters().contains("moe.gate.weight"));
  EXPECT_TRUE(experts.named_parameters().contains("moe.experts.2.w3.weight"));
}

}  // namespace
}  // namespace phalanx::nn
