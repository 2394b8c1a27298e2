#include "phalanx/nn/routing.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace phalanx::nn::routing_test {
namespace {

using testing::ElementsAre;

const std::vector<double> kScores = {0.5, 0.1, 0.4, 0.4, 0.3, 0.6};  // of six experts

std::vector<std::int64_t> chosen(const RoutingOptions& options, const std::vector<double>& bias = {}) {
  const at::Tensor scores = at::tensor(kScores, at::TensorOptions(at::kFloat)).unsqueeze(0);
  const at::Tensor found =
      chosen_experts(scores, bias.empty() ? at::Tensor() : at::tensor(bias, at::TensorOptions(at::kFloat)), options);
  std::vector<std::int64_t> experts(found.const_data_ptr<std::int64_t>(),
                                    found.const_data_ptr<std::int64_t>() + found.numel());
  std::ranges::sort(experts);
  return experts;
}

TEST(Routing, ChoosesTheLargestScores) { EXPECT_THAT(chosen({.experts_per_token = 2}), ElementsAre(0, 5)); }

TEST(Routing, ABiasChangesWhatIsChosenAlone) {
  const RoutingOptions options{.experts_per_token = 2};
  EXPECT_THAT(chosen(options, {0, 0.6, 0, 0, 0, 0}), ElementsAre(1, 5));
  const at::Tensor scores = at::tensor(kScores, at::TensorOptions(at::kFloat)).unsqueeze(0);
  const at::Tensor weights = routing_weights(scores, at::tensor(std::vector<std::int64_t>{1, 5}).unsqueeze(0), options);
  EXPECT_TRUE(at::allclose(weights, at::tensor({0.1 / 0.7, 0.6 / 0.7}, at::TensorOptions(at::kFloat)).unsqueeze(0)));
}

TEST(Routing, OfEqualScoresTheLowestExpertsAreChosen) {
  const at::Tensor scores =
      at::tensor({0.0, -1.0, 0.25, 0.25, -1.0, 0.25}, at::TensorOptions(at::kFloat)).expand({9, 6});
  for (const auto& [k, expected] : std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>>{
           {1, {2}}, {2, {2, 3}}, {4, {2, 3, 5, 0}}, {5, {2, 3, 5, 0, 1}}}) {
    const at::Tensor found = chosen_experts(scores, at::Tensor(), {.experts_per_token = k});
    for (std::int64_t row = 0; row < 9; ++row) EXPECT_TRUE(at::equal(found[row], at::tensor(expected))) << k;
  }
}

// Groups of two: {0.5, 0.1}, {0.4, 0.4}, {0.3, 0.6}.
TEST(Routing, AGroupIsAsGoodAsItsBestExpertOrItsBestTwo) {
  RoutingOptions options{.experts_per_token = 2, .groups = 3, .groups_per_token = 1};
  EXPECT_THAT(chosen(options), ElementsAre(4, 5));
  options.groups_per_token = 2;
  EXPECT_THAT(chosen(options), ElementsAre(0, 5));  // best of the first and of the last group
  options.form = RouterForm::biased_sigmoid;
  EXPECT_THAT(chosen(options), ElementsAre(2, 5));  // sums 0.6, 0.8, 0.9: without the first group
  options.experts_per_token = 3;
  EXPECT_THAT(chosen(options), ElementsAre(2, 3, 5));
  EXPECT_THAT(chosen(options, {0.5, 0, 0, 0, 0, 0}), ElementsAre(0, 4, 5));  // the bias counts for the group, too
}

TEST(Routing, WeightsAreSharesOrScoresTimesTheScaling) {
  const at::Tensor logits = at::tensor({1.0, -2.0, 0.5}, at::TensorOptions(at::kFloat)).unsqueeze(0);
  const at::Tensor both = at::tensor(std::vector<std::int64_t>{0, 2}).unsqueeze(0);
  for (const RouterForm form : {RouterForm::softmax, RouterForm::biased_sigmoid}) {
    const at::Tensor scores = routing_scores(logits, form);
    const at::Tensor expected =
        form == RouterForm::softmax ? logits.exp() / logits.exp().sum() : 1 / (1 + (-logits).exp());
    EXPECT_TRUE(at::allclose(scores, expected));
    const at::Tensor own = expected.index_select(-1, both[0]);
    EXPECT_TRUE(at::allclose(routing_weights(scores, both, {.normalise = true, .form = form, .scaling = 2.5}),
                             own / own.sum() * 2.5));
    EXPECT_TRUE(at::allclose(routing_weights(scores, both, {.normalise = false, .form = form}), own));
  }
}

}  // namespace
}  // namespace phalanx::nn::routing_test
