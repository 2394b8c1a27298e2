#include "phalanx/nn/latent_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "phalanx/nn/init.h"

namespace phalanx::nn::latent_attention_test {
namespace {

constexpr std::int64_t kHeads = 3, kPlain = 5, kRotated = 4, kValues = 6, kRank = 7, kSeq = 7;
constexpr double kScale = 2.5;  // of scores, beside 1 / sqrt(head_dim)

LatentAttentionOptions options(std::int64_t q_rank) {
  const std::int64_t head = kPlain + kRotated;
  return {.dim = 16,
          .n_heads = kHeads,
          .q_rank = q_rank,
          .kv_rank = kRank,
          .head_dim = head,
          .rope = kRotated,
          .value_dim = kValues,
          .query_scalar = static_cast<double>(head) / (kScale * kScale)};
}

at::Tensor normed(const at::Tensor& x, const at::Tensor& weight) {
  return x / ((x * x).mean(-1, /*keepdim=*/true) + 1e-6).sqrt() * weight;
}

/// Pairs of neighbours as complex numbers that are turned.
at::Tensor turned(const at::Tensor& x, const RotaryTables& rope) {
  const at::Tensor a = x.slice(-1, 0, std::nullopt, 2), b = x.slice(-1, 1, std::nullopt, 2);
  return at::stack({a * rope.cos - b * rope.sin, b * rope.cos + a * rope.sin}, -1).flatten(-2);
}

/// Head by head.
at::Tensor by_hand(const LatentAttention& layer, const at::Tensor& x, const RotaryTables& rope) {
  const at::Tensor q =
      layer.wq ? at::linear(x, layer.wq->weight)
               : at::linear(normed(at::linear(x, layer.wq_a->weight), layer.q_norm->weight), layer.wq_b->weight);
  const at::Tensor both = at::linear(x, layer.wkv_a->weight);
  const at::Tensor kv = at::linear(normed(both.narrow(-1, 0, kRank), layer.kv_norm->weight), layer.wkv_b->weight);
  const at::Tensor k_rope = turned(both.narrow(-1, kRank, kRotated), rope);
  const at::Tensor hidden = at::ones({kSeq, kSeq}).tril().eq(0);
  std::vector<at::Tensor> results;
  for (std::int64_t h = 0; h < kHeads; ++h) {
    const at::Tensor of_q = q.narrow(-1, h * (kPlain + kRotated), kPlain + kRotated);
    const at::Tensor of_kv = kv.narrow(-1, h * (kPlain + kValues), kPlain + kValues);
    const at::Tensor plain = at::matmul(of_q.narrow(-1, 0, kPlain), of_kv.narrow(-1, 0, kPlain).transpose(1, 2));
    const at::Tensor rotated = at::matmul(turned(of_q.narrow(-1, kPlain, kRotated), rope), k_rope.transpose(1, 2));
    const at::Tensor scores = (plain + rotated) * (kScale / std::sqrt(static_cast<double>(kPlain + kRotated)));
    const at::Tensor weights = at::softmax(scores.masked_fill(hidden, -INFINITY), -1);
    results.push_back(at::matmul(weights, of_kv.narrow(-1, kPlain, kValues)));
  }
  return at::linear(at::cat(results, -1), layer.wo->weight);
}

class LatentAttentionTest : public testing::TestWithParam<std::int64_t> {};

TEST_P(LatentAttentionTest, EqualsItsFormulaWithAndWithoutACache) {
  LatentAttention layer(options(GetParam()));
  initialise(layer, 1);
  {
    const at::NoGradGuard no_grad;
    for (const auto& parameter : layer.parameters()) parameter.copy_(at::randn(parameter.sizes()) * 0.4 + 0.1);
  }
  const at::Tensor x = at::randn({2, kSeq, 16}).set_requires_grad(true);
  const auto rope = rotary_tables({.head_dim = kRotated, .theta = 100.0}, kSeq);
  const at::Tensor expected = by_hand(layer, x, rope), found = call(layer, x, rope);
  EXPECT_TRUE(at::allclose(found, expected, 1e-4, 1e-5));
  const at::Tensor weights = at::randn(found.sizes());
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& y : {expected, found}) {
    (y * weights).sum().backward();
    for (const auto& parameter : layer.parameters()) gradients.push_back(parameter.grad().clone());
    gradients.push_back(x.grad().clone());
    for (const auto& parameter : layer.parameters()) parameter.grad().zero_();
    x.mutable_grad().zero_();
  }
  const std::size_t half = gradients.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    EXPECT_GT(gradients[i].abs().max().item<double>(), 1e-3);
    EXPECT_TRUE(at::allclose(gradients[half + i], gradients[i], 1e-3, 1e-4)) << i;
  }

  const at::NoGradGuard no_grad;
  KvCache cache({.layers = 1, .batch = 2, .kv_heads = layer.cached_heads(), .max_len = kSeq, .head_dim = 9});
  std::int64_t seen = 0;
  for (const std::int64_t n : {3, 1, 2, 1}) {  // a prompt, one token, several behind others, one that fills it
    cache.begin(n);
    const at::Tensor y = call(layer, x.narrow(1, seen, n), rope.narrow(seen, n), cache, 0);
    cache.finish();
    EXPECT_TRUE(at::allclose(y, expected.narrow(1, seen, n), 1e-4, 1e-5)) << seen;
    seen += n;
  }
}

INSTANTIATE_TEST_SUITE_P(RanksOfQueries, LatentAttentionTest, testing::Values(0, 10));

}  // namespace
}  // namespace phalanx::nn::latent_attention_test
