// Parts of a Llama: the same parameters under the same names and, run one after the other, the same function.
#include "phalanx/models/config/llama_part.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/layout/balance_stages.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"

namespace phalanx::models {
namespace {

TEST(BalanceStages, TheLargestSumIsTheSmallestPossible) {
  EXPECT_THAT(balance_stages({4, 1, 1, 2, 3}, 3), ElementsAre(1, 3, 1));
  EXPECT_THAT(balance_stages({1, 1, 1, 1}, 2), ElementsAre(2, 2));
  EXPECT_THAT(balance_stages({1, 1, 1}, 3), ElementsAre(1, 1, 1));
  EXPECT_THAT(balance_stages({1, 1, 9}, 2), ElementsAre(2, 1));
  EXPECT_THAT(balance_stages({0, 0, 0, 0}, 2), ElementsAre(3, 1));
  EXPECT_THAT(balance_stages({7}, 1), ElementsAre(1));
  EXPECT_THAT(error_text([] { balance_stages({1, 2}, 3); }), HasSubstr("2 parts cannot be divided into 3 stages"));
  EXPECT_THAT(error_text([] { balance_stages({1, 2}, 0); }), HasSubstr("expected 1 to 2 stages"));
  EXPECT_THAT(error_text([] { balance_stages({1, -2}, 1); }), HasSubstr("part 1 costs -2"));
}

// Compared with every possible division.
TEST(BalanceStages, NoDivisionIsBetter) {
  const std::vector<double> costs = {3, 1, 4, 1, 5, 9, 2, 6};
  for (int stages = 1; stages <= 8; ++stages) {
    double best = 1e9;
    for (unsigned cuts = 0; cuts < 128; ++cuts) {
      if (__builtin_popcount(cuts) != stages - 1) continue;
      double largest = 0, sum = 0;
      for (std::size_t i = 0; i < costs.size(); ++i) {
        sum += costs[i];
        largest = std::max(largest, sum);
        if (((cuts >> i) & 1U) != 0) sum = 0;
      }
      best = std::min(best, largest);
    }
    double largest = 0;
    std::size_t at = 0;
    for (const int count : balance_stages(costs, stages)) {
      double sum = 0;
      for (int i = 0; i < count; ++i) sum += costs[at++];
      largest = std::max(largest, sum);
    }
    EXPECT_EQ(at, costs.size());
    EXPECT_EQ(largest, best) << stages;
  }
}

LlamaConfig four_layers(bool tied) {
  LlamaConfig config = llama_flavor("debug");
  config.n_layers = 4;
  config.vocab_size = 64;
  config.max_seq_len = 16;
  config.tie_embeddings = tied;
  return config;
}

TEST(LlamaPart, DividesByLayers) {
  const LlamaConfig config = four_layers(false);
  const auto parts = divide_llama(config, {1.5, 2.5});
  EXPECT_EQ(parts[0], (LlamaPart{.begin = 0, .end = 3, .embedding = true}));
  EXPECT_EQ(parts[1], (LlamaPart{.begin = 3, .end = 8, .head = true}));
  EXPECT_EQ(parts[0].text(), "embedding, layers 0 to 1.5");
  EXPECT_EQ(divide_llama(config, {0, 4, 0})[2].text(), "norm and output");
  EXPECT_TRUE(divide_llama(config, {4})[0].is_whole(config));
  EXPECT_THAT(error_text([&] {
                divide_llama(config, {1, 2});
              }),
              HasSubstr("[1, 2]: their sum is 3; expected n_layers = 4"));
  EXPECT_THAT(error_text([&] { divide_llama(config, {1.2, 2.8}); }), HasSubstr("stage 0 cannot have 1.2 layers"));
  EXPECT_THAT(error_text([&] { divide_llama(config, {2, 0, 2}); }), HasSubstr("stage 1 cannot have 0 layers"));
}

TEST(LlamaPart, DividesByCosts) {
  const LlamaConfig config = four_layers(false);
  const std::vector<double> costs = {1, 1, 1, 1, 1, 1, 1, 1, 2};  // the output costs as much as a layer
  const auto parts = balance_llama(config, 2, costs);
  EXPECT_EQ(parts[0].end, 5);
  EXPECT_EQ(parts[1].end, 8);
  EXPECT_EQ(llama_costs(config, 16).size(), 9U);
  EXPECT_EQ(balance_llama(config, 4, 16).size(), 4U);
  EXPECT_EQ(balance_llama(config, 1, 16)[0], full_llama(config));
  EXPECT_THAT(error_text([&] { balance_llama(config, 9, 16); }), HasSubstr("9 pipeline stages for 4 layers"));
  EXPECT_THAT(error_text([&] { balance_llama(config, 2, std::vector<double>{1.0}); }),
              HasSubstr("2 * n_layers + 1 = 9"));
}

TEST(LlamaPart, PartsAreTheWhole) {
  for (const bool tied : {false, true}) {
    const LlamaConfig config = four_layers(tied);
    Llama whole(config);
    nn::initialise(whole, 5);
    std::map<std::string, at::Tensor> expected;
    for (const auto& p : nn::named_parameters(whole)) expected[p.name] = p.tensor;
    const at::Tensor tokens = at::randint(64, {2, 16}, at::kLong), labels = at::randint(64, {2, 16}, at::kLong);
    for (const auto& layers : std::vector<std::vector<double>>{{2, 2}, {0.5, 3, 0.5}, {0, 4, 0}, {1.5, 1, 1, 0.5}}) {
      at::Tensor x = tokens, loss;
      std::map<std::string, int> owners;
      for (const auto& part : divide_llama(config, layers)) {
        Llama stage(config, part);
        nn::initialise(stage, 5);
        for (const auto& p : nn::named_parameters(stage)) {
          ASSERT_TRUE(expected.contains(p.name)) << p.name;
          EXPECT_TRUE(at::equal(p.tensor, expected[p.name])) << p.name;
          ++owners[p.name];
        }
        if (part.head) loss = stage.loss(x, labels);
        if (!part.head) {
          EXPECT_THAT(error_text([&] { stage.loss(x, labels); }), HasSubstr("has no loss"));
        }
        x = stage.forward(x);
      }
      EXPECT_TRUE(at::equal(x, whole.forward(tokens)));
      EXPECT_EQ(loss.item<float>(), whole.loss(tokens, labels).item<float>());
      EXPECT_EQ(owners.size(), expected.size());
      for (const auto& [name, count] : owners) EXPECT_EQ(count, tied && name == "tok_embeddings.weight" ? 2 : 1);
    }
  }
}

// Parts with separate caches, also of half-layers, give the bits of the whole model with its cache.
TEST(LlamaPart, PartsDecodeAsTheWholeDoes) {
  for (const bool tied : {false, true}) {
    const LlamaConfig config = four_layers(tied);
    const auto whole = std::make_shared<Llama>(config);
    nn::initialise(*whole, 5);
    std::vector<std::unique_ptr<Llama>> parts;
    std::vector<nn::KvCache> caches;
    for (const LlamaPart& part : divide_llama(config, {0.0, 1.5, 2.0, 0.5})) {
      parts.push_back(std::make_unique<Llama>(config, part));
      nn::initialise(*parts.back(), 5);
      caches.push_back(parts.back()->make_cache(2, 16));
    }
    const c10::InferenceMode inference;
    nn::KvCache cache = whole->make_cache(2, 16);
    const at::Tensor tokens = at::randint(config.vocab_size, {2, 9}, at::kLong);
    const auto expect_the_same = [&](const at::Tensor& input, const std::vector<std::int64_t>& counts) {
      at::Tensor x = input;
      for (std::size_t i = 0; i < parts.size(); ++i) x = parts[i]->forward(x, caches[i], counts);
      EXPECT_TRUE(at::equal(x, whole->forward(input, cache, counts)));
    };
    expect_the_same(tokens.narrow(1, 0, 7), {7, 4});
    expect_the_same(tokens.narrow(1, 7, 1), {});
    expect_the_same(tokens.narrow(1, 8, 1), {});
  }
}

TEST(LlamaPart, RefusesWhatItCannotDo) {
  const LlamaConfig config = four_layers(false);
  Llama part(config, divide_llama(config, {2, 2})[1]);
  EXPECT_THAT(
      error_text([&] {
        part.forward(at::randint(64, {2, 16}, at::kLong));
      }),
      HasSubstr("layers 2 to 4, norm and output): expected hidden states of shape [batch, seq, 64], found [2, 16]"));
  EXPECT_THAT(error_text([&] { Llama(config, {.begin = 2, .end = 9}); }), HasSubstr("half-layers 2 to 9"));
}

}  // namespace
}  // namespace phalanx::models
