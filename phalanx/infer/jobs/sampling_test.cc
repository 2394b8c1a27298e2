#include "phalanx/infer/jobs/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::infer {
namespace {

const std::vector<float> kLogits{std::log(0.1f), std::log(0.4f), std::log(0.05f), std::log(0.3f), std::log(0.15f)};

std::set<std::int64_t> drawn(const SamplingOptions& options, const std::vector<float>& logits, int draws = 3000) {
  Sampler sampler(options, static_cast<std::int64_t>(logits.size()));
  std::set<std::int64_t> tokens;
  for (int position = 0; position < draws; ++position)
    tokens.insert(sampler.sample(logits, static_cast<std::uint64_t>(position)));
  return tokens;
}

TEST(Sampling, GreedyTakesTheFirstOfTheLargest) {
  EXPECT_THAT(drawn({.temperature = 0}, kLogits, 5), ElementsAre(1));
  EXPECT_THAT(drawn({.top_k = 1}, kLogits, 5), ElementsAre(1));
  std::vector<float> logits(100, -1.0f);
  EXPECT_THAT(drawn({.temperature = 0}, logits, 1), ElementsAre(0));
  logits[37] = logits[98] = 2.0f;  // in the vectorised part and in the rest
  EXPECT_THAT(drawn({.temperature = 0}, logits, 1), ElementsAre(37));
  logits[98] = 3.0f;
  EXPECT_THAT(drawn({.temperature = 0}, logits, 1), ElementsAre(98));
}

TEST(Sampling, TopKAndTopPKeepTheirSets) {
  EXPECT_THAT(drawn({}, kLogits), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(drawn({.top_k = 2}, kLogits), ElementsAre(1, 3));
  EXPECT_THAT(drawn({.top_k = 9}, kLogits), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(drawn({.top_p = 0.3}, kLogits), ElementsAre(1));     // 0.4 is enough
  EXPECT_THAT(drawn({.top_p = 0.6}, kLogits), ElementsAre(1, 3));  // 0.4 is not
  EXPECT_THAT(drawn({.top_p = 0.8}, kLogits), ElementsAre(1, 3, 4));
  EXPECT_THAT(drawn({.top_k = 2, .top_p = 0.57}, kLogits), ElementsAre(1));  // 0.4 / (0.4 + 0.3) = 0.571
  EXPECT_THAT(drawn({.top_k = 2, .top_p = 0.58}, kLogits), ElementsAre(1, 3));
}

TEST(Sampling, EqualLogitsRankById) {
  const std::vector<float> equal(6, 0.5f);
  EXPECT_THAT(drawn({.top_k = 3}, equal), ElementsAre(0, 1, 2));
  EXPECT_THAT(drawn({.top_p = 0.5}, equal), ElementsAre(0, 1, 2));
}

TEST(Sampling, TemperatureSharpensAndFlattens) {
  Sampler cold({.temperature = 0.5, .top_k = 3}, 5);
  // 0.4^2 : 0.3^2 : 0.15^2 = 0.16 : 0.09 : 0.0225
  EXPECT_THAT(cold.distribution(kLogits),
              ElementsAre(Pair(1, DoubleNear(0.5872, 1e-4)), Pair(3, DoubleNear(0.3303, 1e-4)),
                          Pair(4, DoubleNear(0.0826, 1e-4))));
  Sampler hot({.temperature = 1e6}, 5);
  for (const auto& [token, probability] : hot.distribution(kLogits)) EXPECT_NEAR(probability, 0.2, 1e-4) << token;
}

TEST(Sampling, FrequenciesFollowTheDistribution) {
  for (const SamplingOptions options : {SamplingOptions{.seed = 3},
                                        {.temperature = 0.5, .seed = 5},
                                        {.temperature = 0.7, .top_k = 4, .top_p = 0.95, .seed = 4}}) {
    Sampler sampler(options, 5);
    std::map<std::int64_t, double> counts;
    constexpr int kDraws = 40'000;
    for (int i = 0; i < kDraws; ++i) counts[sampler.sample(kLogits, static_cast<std::uint64_t>(i))] += 1.0 / kDraws;
    double left = 1;
    for (const auto& [token, probability] : sampler.distribution(kLogits)) {
      EXPECT_NEAR(counts[token], probability, 4 * std::sqrt(probability / kDraws))
          << token;  // four standard deviations
      left -= counts[token];
    }
    EXPECT_NEAR(left, 0, 1e-9);
  }
}

TEST(Sampling, ADrawDependsOnSeedAndPositionOnly) {
  Sampler a({.seed = 5}, 5), b({.seed = 5}, 5), c({.seed = 6}, 5);
  std::vector<std::int64_t> forwards, backwards(64), other;
  for (std::uint64_t i = 0; i < 64; ++i) forwards.push_back(a.sample(kLogits, i));
  for (std::uint64_t i = 64; i-- > 0;) backwards[i] = b.sample(kLogits, i);
  for (std::uint64_t i = 0; i < 64; ++i) other.push_back(c.sample(kLogits, i));
  EXPECT_EQ(forwards, backwards);
  EXPECT_NE(forwards, other);
}

TEST(Sampling, TopPReachesFarIntoALargeVocabulary) {
  // Nearly flat: top_p 0.9 needs about 0.9 of 5,000 tokens, beyond the first parts that are sorted.
  std::mt19937 random(1);
  std::vector<float> logits(5000);
  for (auto& logit : logits) logit = static_cast<float>(random() % 1000) * 1e-6f;
  Sampler sampler({.top_p = 0.9}, 5000);
  const auto chosen = sampler.distribution(logits);
  EXPECT_NEAR(static_cast<double>(chosen.size()), 4500, 5);
  for (std::size_t i = 1; i < chosen.size(); ++i) EXPECT_GE(logits[chosen[i - 1].first], logits[chosen[i].first]);
}

TEST(Sampling, TopKKeepsTheLargestOfALargeVocabulary) {
  std::mt19937 random(2);
  std::vector<float> logits(5000);
  for (auto& logit : logits) logit = static_cast<float>(random() % 100'000) * 1e-5f;
  auto sorted = logits;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const auto chosen = Sampler({.top_k = 700}, 5000).distribution(logits);
  ASSERT_EQ(chosen.size(), 700U);
  for (std::size_t i = 0; i < chosen.size(); ++i) EXPECT_EQ(logits[chosen[i].first], sorted[i]) << i;
}

TEST(Sampling, ExcludedTokensAreNeverDrawn) {
  auto logits = kLogits;
  logits[1] = -std::numeric_limits<float>::infinity();
  EXPECT_THAT(drawn({}, logits), ElementsAre(0, 2, 3, 4));
  EXPECT_THAT(drawn({.top_k = 5}, logits), ElementsAre(0, 2, 3, 4));
}

TEST(Sampling, LogitsThatAreNotNumbersAreAnError) {
  auto logits = kLogits;
  logits[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(drawn({}, logits, 1), Error);
  EXPECT_THROW(drawn({.temperature = 0}, logits, 1), Error);
  logits[2] = std::numeric_limits<float>::infinity();
  EXPECT_THROW(drawn({}, logits, 1), Error);
}

TEST(Sampling, OptionsOutOfRangeAreRefused) {
  for (const SamplingOptions options : {SamplingOptions{.temperature = -1},
                                        {.temperature = NAN},
                                        {.temperature = INFINITY},
                                        {.top_k = -1},
                                        {.top_p = 0},
                                        {.top_p = 1.5},
                                        {.top_p = NAN}})
    EXPECT_THROW(options.validate(), ConfigError);
}

TEST(Sampler, TokensThatWereThereBecomeLessLikely) {
  Sampler sampler({.repetition_penalty = 2.0}, 4);
  const std::vector<float> logits = {1.0f, 2.0f, -1.0f, -2.0f};
  const auto plain = Sampler({}, 4).distribution(logits);
  EXPECT_EQ(sampler.distribution(logits), plain);
  const std::vector<std::int64_t> seen = {1, 2, 1};
  sampler.note(seen);  // 2 -> 1, -1 -> -2; once, however often they were there
  const auto halved = Sampler({}, 4).distribution(std::vector<float>{1.0f, 1.0f, -2.0f, -2.0f});
  EXPECT_EQ(sampler.distribution(logits), halved);
  EXPECT_EQ(Sampler({.temperature = 0, .repetition_penalty = 1.5}, 4).sample(logits, 0), 1);
  Sampler greedy({.temperature = 0, .repetition_penalty = 3.0}, 4);
  greedy.note(seen);
  EXPECT_EQ(greedy.sample(logits, 0), 0);
  EXPECT_THROW((Sampler({.repetition_penalty = 0.0}, 4)), ConfigError);
}

}  // namespace
}  // namespace phalanx::infer
