// Generation on a simulated device: the tokens are those of the whole model run anew for each of them,
// for rows of equal and unequal lengths, with and without a window; and what one step costs: launches,
// and times that the host waits.
#include <ATen/ops/abs.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/infer/generator.h"
#include "phalanx/kernels/attention_sinks.h"
#include "phalanx/kernels/cached_attention.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx::sim_generation_test {
namespace {

using infer::Generator;
using infer::Request;

class SimGeneration : public SimTest, public ::testing::WithParamInterface<at::ScalarType> {
 protected:
  std::shared_ptr<models::Llama> model(std::int64_t window = 0, bool has_sinks = false) const {
    models::LlamaConfig config{.family = window > 0 ? models::LlamaFamily::mistral : models::LlamaFamily::llama,
                               .dim = 64,
                               .n_layers = 2,
                               .n_heads = 4,
                               .n_kv_heads = 2,
                               .ffn_hidden = 96,
                               .vocab_size = 61,
                               .max_seq_len = 64,
                               .sliding_window = window};
    if (has_sinks) {
      config.family = models::LlamaFamily::gpt_oss;
      config.experts = config.experts_per_token = 2;
      config.activation_limit = 7;
      config.full_layers = {1};
    }
    auto made =
        std::make_shared<models::Llama>(config, nn::TensorOptionsOfModule{.dtype = GetParam(), .device = device});
    nn::initialise(*made, 3);
    const at::NoGradGuard no_grad;  // larger weights, so that the likeliest tokens have clear margins
    for (auto& [name, parameter, shard] : nn::named_parameters(*made)) {
      if (parameter.dim() == 2) parameter.mul_(30);
      if (name.ends_with("sinks")) parameter.mul_(50).add_(1);
    }
    return made;
  }
  static std::vector<std::int64_t> prompt_of(std::size_t length, std::int64_t first) {
    std::vector<std::int64_t> prompt;
    for (std::size_t i = 0; i < length; ++i) prompt.push_back((first + 17 * static_cast<std::int64_t>(i)) % 61);
    return prompt;
  }
  /// Up to the first token whose logit is so near to another one's that rounding to 16 bits decides.
  std::vector<std::int64_t> without_cache(models::Llama& llama, std::vector<std::int64_t> tokens, int count) const {
    const at::NoGradGuard no_grad;
    std::vector<std::int64_t> result;
    for (int i = 0; i < count; ++i) {
      const at::Tensor row = at::tensor(tokens, at::TensorOptions(at::kLong)).unsqueeze(0).to(device);
      const at::Tensor logits = llama.forward(row).select(0, 0).select(0, -1).to(at::kCPU, at::kFloat);
      const auto [best, which] = logits.topk(2);
      const double margin = (best[0] - best[1]).item<double>();
      if (GetParam() != at::kFloat && margin < 0.02 * logits.abs().max().item<double>()) break;
      result.push_back(which[0].item<std::int64_t>());
      tokens.push_back(result.back());
    }
    return result;
  }
  static Request greedy(std::vector<std::int64_t> prompt, std::int64_t count) {
    return {.prompt = std::move(prompt), .max_new_tokens = count, .sampling = {.temperature = 0}};
  }
};

TEST_P(SimGeneration, TokensAreThoseOfTheWholeModel) {
  std::size_t compared = 0;
  for (const auto& [window, has_sinks] : {std::pair(0, false), {6, false}, {6, true}}) {
    const auto llama = model(window, has_sinks);
    for (const std::vector<std::size_t>& lengths : {std::vector<std::size_t>{7}, {5, 5, 5}, {9, 3, 6, 4}}) {
      std::vector<Request> requests;
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        requests.push_back(greedy(prompt_of(lengths[i], static_cast<std::int64_t>(3 * i) + 2), 12));
      }
      const auto results = Generator(*llama, {.max_batch = 4}).generate(requests);
      std::set<std::int64_t> different;
      for (std::size_t i = 0; i < requests.size(); ++i) {
        const std::vector<std::int64_t> expected = without_cache(*llama, requests[i].prompt, 12);
        ASSERT_EQ(results[i].tokens.size(), 12U);
        compared += expected.size();
        EXPECT_TRUE(std::ranges::equal(expected, std::span(results[i].tokens).first(expected.size())))
            << "window " << window << (has_sinks ? ", sinks" : "") << ", row " << i << " of " << lengths.size();
        different.insert(results[i].tokens.begin(), results[i].tokens.end());
      }
      EXPECT_GT(different.size(), 3u) << "the model repeats itself: a weak test";
    }
  }
  EXPECT_GE(compared, 40U) << "a weak test";
}

// Rows of equal and of unequal lengths, with and without a window, beside plain operators in float32.
TEST_P(SimGeneration, OneTokenSeesASink) {
  at::manual_seed(3);
  constexpr std::int64_t kRows = 3, kMaxLen = 12, kLongest = 10;
  const auto made = [](at::IntArrayRef sizes) { return at::randn(sizes).to(GetParam()); };
  const at::Tensor q = made({kRows, 4, 1, 16}), sinks = made({4});
  const at::Tensor k = made({kRows, kMaxLen, 2, 16}), v = made({kRows, kMaxLen, 2, 16});
  const bool is_narrow = GetParam() != at::kFloat;  // the kernel is one of 16 bits
  ASSERT_EQ(kernels::can_use_cached_attention(q.to(device), k.transpose(1, 2).to(device), v.transpose(1, 2).to(device)),
            is_narrow);
  if (!is_narrow) return;
  const auto seen_of = [](const at::Tensor& all) { return all.narrow(1, 0, kLongest).transpose(1, 2); };
  const auto integers = [&](const std::vector<std::int64_t>& of) { return at::tensor(of).to(at::kInt).to(device); };
  for (const std::vector<std::int64_t>& seen : {std::vector<std::int64_t>{10, 10, 10}, {4, 10, 7}}) {
    const bool are_equal = seen[0] == seen[2];
    const kernels::CachedLengths lengths{.seen = integers(seen),
                                         .first_keys = integers({0, kMaxLen, 2 * kMaxLen, 3 * kMaxLen}),
                                         .first_query = integers({0, 1, 2, 3})};
    for (const std::int64_t window : {0, 3}) {
      const at::Tensor found = kernels::cached_attention(q.to(device), seen_of(k.to(device)), seen_of(v.to(device)),
                                                         are_equal ? nullptr : &lengths, window, sinks.to(device))
                                   .to(at::kCPU, at::kFloat);
      const at::Tensor at = at::arange(kLongest), ends = at::tensor(seen).unsqueeze(1);
      at::Tensor mask = at < ends;
      if (window > 0) mask = mask & (at >= ends - window);
      const at::Tensor expected =
          kernels::masked_attention_with_sinks(q.to(at::kFloat), seen_of(k).to(at::kFloat), seen_of(v).to(at::kFloat),
                                               mask.view({kRows, 1, 1, kLongest}), sinks.to(at::kFloat));
      EXPECT_LT((found - expected).abs().max().item<double>(), 2e-2)
          << "window " << window << (are_equal ? "" : ", unequal");
    }
  }
}

// Seven requests for three rows, which end at different times: rows move, and others take their places.
TEST_P(SimGeneration, RowsThatMoveAndAreFilledAgainKeepTheirTokens) {
  const auto llama = model();
  std::vector<Request> requests;
  for (int i = 0; i < 7; ++i) {
    requests.push_back(greedy(prompt_of(static_cast<std::size_t>(3 + 5 * i % 9), 3 * i + 2), 3 + 4 * i % 11));
  }
  const auto results = Generator(*llama, {.max_batch = 3, .prefill_chunk = 4}).generate(requests);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto count = static_cast<std::size_t>(requests[i].max_new_tokens);
    const std::vector<std::int64_t> expected = without_cache(*llama, requests[i].prompt, static_cast<int>(count));
    ASSERT_EQ(results[i].tokens.size(), count);
    EXPECT_TRUE(std::ranges::equal(expected, std::span(results[i].tokens).first(expected.size()))) << "request " << i;
  }
}

TEST_P(SimGeneration, DrawnTokensAndGreedyOnesShareABatch) {
  const auto llama = model();
  const std::vector<std::int64_t> alone = Generator(*llama).generate({greedy(prompt_of(5, 2), 8)})[0].tokens;
  Request drawn = greedy(prompt_of(5, 9), 8);
  drawn.sampling = {.temperature = 1.0, .seed = 4};
  const auto both = Generator(*llama, {.max_batch = 2}).generate({greedy(prompt_of(5, 2), 8), drawn});
  EXPECT_EQ(both[0].tokens, alone);
  EXPECT_EQ(both[1].tokens.size(), 8u);
}

TEST_P(SimGeneration, LogitsThatAreNoNumbersAreAnError) {
  const auto llama = model();
  {
    const at::NoGradGuard no_grad;
    llama->parameters().back().view(-1).narrow(0, 5, 1).fill_(std::numeric_limits<float>::quiet_NaN());
  }
  Generator generator(*llama);
  EXPECT_THAT(error_text<Error>([&] { generator.generate({greedy(prompt_of(5, 2), 3)}); }),
              ::testing::HasSubstr("logits hold NaN"));
}

TEST_P(SimGeneration, AStepLaunchesFewKernelsAndWaitsForTheTokensAlone) {
  const auto llama = model();
  for (const bool equal : {true, false}) {
    const auto run = [&](std::int64_t tokens) {
      sim.runtime.clear_launches();
      sim.runtime.host_waits().clear();
      Generator(*llama, {.max_batch = 2})
          .generate({greedy(prompt_of(5, 2), tokens), greedy(prompt_of(equal ? 5 : 9, 9), tokens)});
      std::uint64_t launches = 0;
      for (const auto& [name, count] : sim.runtime.launches_by_kernel()) launches += count;
      return std::pair(launches, waits());
    };
    run(2);  // tables are made once
    const auto few = run(4), many = run(14);
    const auto layers = static_cast<std::uint64_t>(llama->config().n_layers);
    fmt::print("{} rows: a step launches {} kernels, and the host waits {} times\n", equal ? "equal" : "unequal",
               (many.first - few.first) / 10, (many.second - few.second) / 10);
    // In float32 a step over unequal rows makes a mask.
    EXPECT_LE((many.first - few.first) / 10,
              equal ? 17 * layers + 5 : (GetParam() == at::kFloat ? 20 : 18) * layers + 14);
    EXPECT_LE((many.second - few.second) / 10, equal ? 2U : 3U);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, SimGeneration, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

}  // namespace
}  // namespace phalanx::sim_generation_test
