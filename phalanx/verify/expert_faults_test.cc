// Faults of expert parallelism are found, and the parameter that they reach is named.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/train/testing/trainer_test_support.h"
#include "phalanx/verify/layout_check.h"
#include "phalanx/verify/layout_side.h"

namespace phalanx::verify::expert_faults_test {
namespace {

using testing::HasSubstr;

class ExpertFaultsTest : public train::TrainerTest {
 protected:
  /// Four ranks shard, two divide the experts. `spoil` gets layer 1's mixture in this layout, and the rank.
  LayoutCheck check(const std::function<void(nn::MixtureOfExperts&, int rank)>& spoil) const {
    std::vector<std::string> keys = mixture();
    keys.insert(keys.end(), {"--training.dataset_path=" + path("tokens.bin"), "--training.seq_len=32",
                             "--training.local_batch_size=2", "--training.global_batch_size=8", "--training.steps=10",
                             "--lr_scheduler.warmup_steps=1", "--parallelism.data_parallel_shard_degree=4",
                             "--parallelism.expert_parallel_degree=2"});
    const config::TrainConfig config = config::parse_config("", "test", keys);
    LayoutCheck result;
    run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
      LayoutCheckContext context{.world = world};
      context.prepare = [&](LayoutSide& side) {
        for (nn::Module* const module : side.model->modules()) {
          const auto& layer = dynamic_cast<models::Llama&>(*module).layers.at(1);
          spoil(dynamic_cast<nn::MixtureOfExperts&>(*layer->feed_forward), world->rank());
        }
      };
      LayoutCheck mine = check_layout(config, context, {.steps = 1});
      if (world->rank() == 0) result = std::move(mine);
    });
    return result;
  }
  /// The same value with a gradient that is `factor` times as large.
  static nn::Module::ParameterUse with_gradient_times(double factor) {
    return [factor](const at::Tensor& weight) { return weight.detach() + (weight - weight.detach()) * factor; };
  }
  static void expect_found(const LayoutCheck& found, const std::string& parameter) {
    ASSERT_TRUE(found.finding);
    EXPECT_THAT(found.finding->parameter, HasSubstr(parameter)) << found.finding->text();
  }
};

TEST_F(ExpertFaultsTest, WithoutAFaultNothingIsFound) {
  const LayoutCheck found = check([](nn::MixtureOfExperts&, int) {});
  EXPECT_FALSE(found.finding) << found.finding->text();
}

// As where the gradient is averaged over the ranks of another group, or summed over it once more.
TEST_F(ExpertFaultsTest, AnExpertsGradientThatIsHalvedOrDoubledIsFound) {
  for (const double factor : {0.5, 2.0}) {
    expect_found(check([&](nn::MixtureOfExperts& mixture, int) {
                   for (const auto& [number, net] : mixture.experts->nets()) {
                     net->w2->set_parameter_use("weight", with_gradient_times(factor));
                   }
                 }),
                 "layers.1.moe.experts.");
  }
}

TEST_F(ExpertFaultsTest, ARoutersGradientThatOneRankDoesNotAddIsFound) {
  expect_found(check([](nn::MixtureOfExperts& mixture, int rank) {
                 mixture.gate->set_parameter_use("weight", with_gradient_times(rank == 1 ? 0 : 1));
               }),
               "layers.1.moe.gate.weight");
}

TEST_F(ExpertFaultsTest, RowsThatComeBackInAnotherOrderAreFound) {
  expect_found(
      check([](nn::MixtureOfExperts& mixture, int rank) {
        if (rank != 2) return;
        mixture.experts->add_post_forward_hook([](nn::Module&, const at::Tensor& out) { return at::roll(out, 1, 0); });
      }),
      "layers.1.");
}

TEST_F(ExpertFaultsTest, ARowThatIsLostIsFound) {
  expect_found(check([](nn::MixtureOfExperts& mixture, int rank) {
                 if (rank != 3) return;
                 mixture.experts->add_post_forward_hook([](nn::Module&, const at::Tensor& out) {
                   const std::int64_t kept = out.size(0) - 1;
                   return at::cat({out.narrow(0, 0, kept), at::zeros_like(out.narrow(0, kept, 1))});
                 });
               }),
               "layers.1.");
}

}  // namespace
}  // namespace phalanx::verify::expert_faults_test
