#include "phalanx/parallel/pipeline/sequential_pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "phalanx/base/testing/error_text.h"
#include "phalanx/parallel/pipeline/testing/pipeline_test_support.h"

namespace phalanx {
namespace {

using pipeline_testing::descend;
using pipeline_testing::kLayers;
using pipeline_testing::Layers;
using pipeline_testing::one_rank;
using pipeline_testing::random_rows;
using pipeline_testing::squared_error;
using pipeline_testing::torch_layers;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> names_of(const SequentialPipeline& pipeline) {
  std::vector<std::string> names;
  for (const NamedTensor& parameter : pipeline.parameters()) names.push_back(parameter.name);
  return names;
}

TEST(SequentialPipelineTest, OneCallGivesTheLossesOfOneRank) {
  const at::Tensor x = random_rows(16, "x"), y = random_rows(16, "y");
  for (const auto& [schedule, stages] : {std::pair("GPipe", 1), std::pair("ZBV", 2), std::pair("ZB1P", 1)}) {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
      SequentialPipeline pipeline(torch_layers(), squared_error, comm,
                                  {.chunks = 8, .schedule = schedule, .stages_per_rank = stages});
      const auto reference = one_rank(Layers::foreign, 8);
      std::map<std::string, at::Tensor> mine;
      for (const NamedTensor& parameter : pipeline.parameters()) mine[parameter.name] = parameter.tensor;
      EXPECT_EQ(mine.size(), 2U * kLayers / 2);
      for (int step = 0; step < 3; ++step) {
        const std::vector<double> expected = reference.step(x, y), found = pipeline.runtime().step(x, y).losses;
        ASSERT_EQ(found.size(), 8U);
        for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 2e-5 * expected[i]);
        descend(mine, 0.1);
        descend(reference.parameters(), 0.1);
      }
    });
  }
}

TEST(SequentialPipelineTest, StagesHaveAboutEqualNumbersOfParametersOrTheChildrenThatAreGiven) {
  const auto net = [] {
    return torch::nn::Sequential(torch::nn::Linear(2, 2), torch::nn::ReLU(), torch::nn::Linear(2, 2), torch::nn::ReLU(),
                                 torch::nn::Linear(2, 64));
  };
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    const SequentialPipeline balanced(net(), squared_error, comm),
        given(net(), squared_error, comm, {.children = {2, 3}});
    if (comm->rank() == 0) {
      EXPECT_THAT(names_of(balanced), ElementsAre("0.weight", "0.bias", "2.weight", "2.bias"));
      EXPECT_THAT(names_of(given), ElementsAre("0.weight", "0.bias"));
    } else {
      EXPECT_THAT(names_of(balanced), ElementsAre("4.weight", "4.bias"));
      EXPECT_THAT(names_of(given), ElementsAre("2.weight", "2.bias", "4.weight", "4.bias"));
    }
  });
}

TEST(SequentialPipelineTest, RefusesStagesThatCannotBe) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    const auto error = [&](const torch::nn::Sequential& net, SequentialPipelineOptions options) {
      return error_text<ConfigError>([&] { SequentialPipeline(net, squared_error, comm, options); });
    };
    const torch::nn::Sequential one(torch::nn::Linear(2, 2));
    EXPECT_THAT(error(one, {}), HasSubstr("2 stages of a Sequential with 1 children: expected one for each"));
    const torch::nn::Sequential two(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
    for (const std::vector<int>& wrong : {std::vector{2}, {0, 2}, {1, 2}}) {
      EXPECT_THAT(error(two, {.children = wrong}),
                  HasSubstr("expected 2 numbers above 0, one for each stage, that add up to 2"));
    }
    EXPECT_THAT(error(two, {.schedule = "GPype"}), HasSubstr("unknown pipeline schedule 'GPype'"));
    EXPECT_THAT(error(two, {.chunks = 0}), HasSubstr("0 micro-batches"));
    const torch::nn::Linear shared(2, 2);
    EXPECT_THAT(error(torch::nn::Sequential(shared, torch::nn::ReLU(), shared), {}),
                HasSubstr("parameter '2.weight' is '0.weight', too: expected a parameter in one child alone"));
  });
}

}  // namespace
}  // namespace phalanx
