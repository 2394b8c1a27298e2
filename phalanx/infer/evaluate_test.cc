#include "phalanx/infer/evaluate.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/infer/jobs/questions.h"
#include "phalanx/infer/testing/part_of_model.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"

namespace phalanx::infer {
namespace {

const models::LlamaConfig kConfig{
    .dim = 32, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_hidden = 48, .vocab_size = 64, .max_seq_len = 20};

std::shared_ptr<models::Llama> scored_model(const models::LlamaConfig& config = kConfig) {
  auto model = std::make_shared<models::Llama>(config);
  nn::initialise(*model, 3);
  const at::NoGradGuard no_grad;
  for (auto& [name, parameter, shard] : nn::named_parameters(*model))
    if (parameter.dim() == 2) parameter.mul_(20);
  return model;
}

std::vector<ScoredText> texts() {
  std::vector<ScoredText> all;
  for (std::int64_t i = 0; i < 7; ++i) {
    ScoredText text{.tokens = {}, .first = 1 + i % 4};
    for (std::int64_t t = 0; t < 5 + 5 * i % 17; ++t) text.tokens.push_back((7 * i + 3 * t * t) % 64);
    if (i % 3 == 2) {
      for (std::size_t t = 0; t < text.tokens.size(); ++t) text.is_scored.push_back(t % 2 == 0 ? 1 : 0);
    }
    all.push_back(std::move(text));
  }
  return all;
}

/// Each text by itself, from the logits of the whole text.
std::vector<double> scores_by_hand(models::Llama& model) {
  const at::NoGradGuard no_grad;
  std::vector<double> scores;
  for (const auto& [tokens, first, is_scored] : texts()) {
    const at::Tensor ids = at::tensor(tokens, at::TensorOptions(at::kLong)).unsqueeze(0);
    const at::Tensor log_p = at::log_softmax(model.forward(ids.narrow(1, 0, ids.size(1) - 1)).to(at::kDouble), -1)[0];
    double sum = 0;
    for (std::int64_t t = first; t < std::ssize(tokens); ++t) {
      const auto at = static_cast<std::size_t>(t);
      if (is_scored.empty() || is_scored[at] != 0) sum += log_p[t - 1][tokens[at]].item<double>();
    }
    scores.push_back(sum);
  }
  return scores;
}

void expect_close(const std::vector<double>& found, const std::vector<double>& expected, const std::string& where) {
  ASSERT_EQ(found.size(), expected.size()) << where;
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-4) << where << ", text " << i;
}

TEST(Evaluator, ScoresAreTheLogLikelihoodsOfEachTextAlone) {
  const auto model = scored_model();
  const auto expected = scores_by_hand(*model);
  EXPECT_LT(expected[0], -1.0);
  for (const std::int64_t max_batch : {1, 3, 8}) {
    expect_close(Evaluator(*model, {.max_batch = max_batch}).log_likelihoods(texts()), expected,
                 std::to_string(max_batch));
  }
  EXPECT_TRUE(Evaluator(*model).log_likelihoods({}).empty());
}

// Angles that depend on a text's length are not those of a longer neighbour in the batch.
TEST(Evaluator, ABatchDoesNotChangeTheAnglesOfItsTexts) {
  for (const RopeScalingType type : {RopeScalingType::dynamic, RopeScalingType::longrope}) {
    models::LlamaConfig config = kConfig;
    config.rope_scaling = {.type = type, .factor = 2, .original_max_seq_len = 10};
    if (type == RopeScalingType::longrope) {
      config.rope_scaling.short_factor = {1, 1, 1, 1};
      config.rope_scaling.long_factor = {2, 4, 6, 8};
    }
    const auto model = scored_model(config);
    for (const std::int64_t max_batch : {1, 3, 7}) {
      Evaluator evaluator(*model, {.max_batch = max_batch});
      expect_close(evaluator.log_likelihoods(texts()), scores_by_hand(*model), std::to_string(max_batch));
    }
  }
}

TEST(Evaluator, EveryLayoutGivesTheSame) {
  const auto whole = scored_model();
  const auto expected = scores_by_hand(*whole);
  for (const auto& [pp, tp] : std::vector<std::pair<int, int>>{{2, 1}, {3, 1}, {1, 2}, {2, 2}}) {
    run_local_ranks(pp * tp, [&](const std::shared_ptr<Communicator>& world) {
      const DeviceMesh mesh(world, {{"pp", pp}, {"tp", tp}});
      const auto model = part_of_model(*whole, mesh);
      Evaluator evaluator(*model, {.max_batch = 2, .stages = pp > 1 ? mesh.communicator("pp") : nullptr});
      expect_close(evaluator.log_likelihoods(texts()), expected, std::to_string(pp) + " x " + std::to_string(tp));
    });
  }
}

TEST(Evaluator, WhatCannotBeScoredIsNamed) {
  const auto model = scored_model();
  const auto fault = [&](const ScoredText& text) {
    return error_text([&] { Evaluator(*model).log_likelihoods({{.tokens = {1, 2}}, text}); });
  };
  EXPECT_THAT(fault({.tokens = {1}}), HasSubstr("text 2: tokens from 1 on are to be scored, of 1"));
  EXPECT_THAT(fault({.tokens = {1, 2}, .first = 0}), HasSubstr("tokens from 0 on are to be scored, of 2"));
  EXPECT_THAT(fault({.tokens = {1, 64}}), HasSubstr("token 64 is not in the model's vocabulary of 64"));
  EXPECT_THAT(fault({.tokens = std::vector<std::int64_t>(22, 1)}),
              HasSubstr("22 tokens; the model's max_seq_len of 20"));
  EXPECT_EQ(fault({.tokens = std::vector<std::int64_t>(21, 1)}), "");
  EXPECT_THROW(Evaluator(*model, {.max_batch = 0}), ConfigError);
  models::Llama part(kConfig, models::balance_llama(kConfig, 2, 16)[0]);
  EXPECT_THROW(Evaluator{part}, ConfigError);
}

TEST(TextWindows, EveryTokenButTheFirstIsScoredOnce) {
  for (const std::int64_t size : {2, 5, 9, 10, 31}) {
    for (const std::int64_t stride : {1, 3, 8}) {
      std::int64_t next = 1;
      for (const auto& window : windows_of(size, 8, stride)) {
        EXPECT_EQ(window.first, next);
        EXPECT_GT(window.first, window.begin);
        EXPECT_LE(window.end - window.begin, 9);
        // As much context as fits comes before the scored tokens.
        EXPECT_TRUE(window.begin == 0 || window.end - window.begin == 9);
        next = window.end;
      }
      EXPECT_EQ(next, size) << stride;
    }
  }
  EXPECT_TRUE(windows_of(1, 8, 8).empty());
}

TEST(Questions, AreReadAndWhatIsWrongIsNamed) {
  const auto questions = parse_questions(
      "{\"prompt\": \"a\", \"choices\": [\" b\", \"c\"], \"answer\": 1}\n\n{\"id\": \"x\", \"prompt\": \"\", "
      "\"choices\": [\"d\"]}",
      "q");
  ASSERT_EQ(questions.size(), 2u);
  EXPECT_EQ(questions[0].choices, (std::vector<std::string>{" b", "c"}));
  EXPECT_EQ(questions[0].answer, 1u);
  EXPECT_EQ(questions[1].id, "\"x\"");
  EXPECT_FALSE(questions[1].answer);
  for (const auto& [line, expected] : std::vector<std::pair<std::string, std::string>>{
           {"", "q holds no questions"},
           {"[]", "q, line 1: expected a JSON object, found array"},
           {"{\"choices\": [\"a\"]}", "expected \"prompt\", a string"},
           {"{\"prompt\": \"a\", \"choices\": []}", "expected \"choices\", a list of strings"},
           {"{\"prompt\": \"a\", \"choices\": [\"\"]}", "none of them empty"},
           {"{\"prompt\": \"a\", \"choices\": [\"b\"], \"answer\": 1}", "\"answer\" must be the number of one"},
           {"{\"prompt\": \"a\", \"choices\": [\"b\"], \"answer\": -1}", "\"answer\" must be the number of one"}}) {
    try {
      parse_questions(line, "q");
      ADD_FAILURE() << line;
    } catch (const DataError& error) {
      EXPECT_THAT(error.what(), HasSubstr(expected));
    }
  }
}

}  // namespace
}  // namespace phalanx::infer
