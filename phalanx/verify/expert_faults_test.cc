// Faults of expert parallelism are found, and the parameter that they reach is named.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/models/config/parameter_kinds.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/train/testing/trainer_test_support.h"
#include "phalanx/verify/layout_check.h"
#include "phalanx/verify/layout_side.h"
#include "phalanx/verify/routing_replay.h"

namespace phalanx::verify::expert_faults_test {
namespace {

using testing::HasSubstr;

class ExpertFaultsTest : public train::TrainerTest {
 protected:
  using Keys = std::vector<std::string>;
  /// Four ranks shard, two divide the experts.
  /// `observer`: LayoutCheckContext::observer.
  LayoutCheck check_side(
      const Keys& more, const std::function<void(LayoutSide&, int rank)>& spoil,
      const std::function<void(std::int64_t, const std::vector<NamedTensor>&)>& observer = nullptr) const {
    std::vector<std::string> keys = mixture();
    keys.insert(keys.end(), {"--training.dataset_path=" + path("tokens.bin"), "--training.seq_len=32",
                             "--training.local_batch_size=2", "--training.global_batch_size=8", "--training.steps=10",
                             "--lr_scheduler.warmup_steps=1", "--parallelism.data_parallel_shard_degree=4",
                             "--parallelism.expert_parallel_degree=2"});
    keys.insert(keys.end(), more.begin(), more.end());
    const config::TrainConfig config = config::parse_config("", "test", keys);
    LayoutCheck result;
    run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
      LayoutCheckContext context{.world = world, .observer = observer};
      context.prepare = [&](LayoutSide& side) { spoil(side, world->rank()); };
      LayoutCheck mine = check_layout(config, context, {.steps = 3});
      if (world->rank() == 0) result = std::move(mine);
    });
    return result;
  }
  /// `spoil` gets layer 1's mixture in this layout, and the rank.
  LayoutCheck check(const std::function<void(nn::MixtureOfExperts&, int rank)>& spoil, const Keys& more = {}) const {
    return check_side(more, [&](LayoutSide& side, int rank) { spoil(mixture_of(side), rank); });
  }
  /// Layouts with these keys have one rank's numbers, in fp32 and, computed again, in bfloat16.
  void expect_right(const Keys& keys) const {
    const Keys two_ranks_cut = {"--parallelism.data_parallel_shard_degree=2", "--parallelism.context_parallel_degree=2",
                                "--parallelism.expert_parallel_degree=4", "--training.local_batch_size=4"};
    const Keys tensor = {"--parallelism.data_parallel_shard_degree=2", "--parallelism.tensor_parallel_degree=2",
                         "--training.local_batch_size=4"};
    const Keys narrow = {"--training.mixed_precision_param=bfloat16", "--activation_checkpoint.mode=full"};
    std::vector<Keys> all;
    for (const Keys& layout : {Keys{}, two_ranks_cut, tensor}) {
      for (const Keys& how : {Keys{}, narrow}) {
        all.push_back(keys);
        all.back().insert(all.back().end(), layout.begin(), layout.end());
        all.back().insert(all.back().end(), how.begin(), how.end());
      }
    }
    for (const Keys& one : sampled(all, 2)) {
      const LayoutCheck found = check([](nn::MixtureOfExperts&, int) {}, one);
      EXPECT_FALSE(found.finding) << testing::PrintToString(one) << " " << found.layout << ": "
                                  << found.finding->text();
    }
  }
  static nn::MixtureOfExperts& mixture_of(const LayoutSide& side) {
    const auto& layer = dynamic_cast<models::Llama&>(*side.model->modules().front()).layers.at(1);
    return dynamic_cast<nn::MixtureOfExperts&>(*layer->feed_forward);
  }
  const Keys kBiased = {"--training.moe_router_enable_expert_bias", "--training.moe_router_bias_update_rate=0.05"};
  /// The same value with a gradient that is `factor` times as large.
  static nn::Module::ParameterUse with_gradient_times(double factor) {
    return [factor](const at::Tensor& weight) { return weight.detach() + (weight - weight.detach()) * factor; };
  }
  /// Layer 1's router uses change(its bias).
  static void replace_bias(LayoutSide& side, const std::function<at::Tensor(const at::Tensor& bias)>& change) {
    const at::Tensor bias = side.model->expert_load()->biases()[1], counts = side.model->expert_load()->counts()[1];
    mixture_of(side).add_pre_forward_hook([=](nn::Module& module) {
      dynamic_cast<nn::MixtureOfExperts&>(module).set_tensors({.bias = change(bias), .counts = counts});
    });
  }
  static void expect_found(const LayoutCheck& found, const std::string& parameter) {
    ASSERT_TRUE(found.finding);
    EXPECT_THAT(found.finding->parameter, HasSubstr(parameter)) << found.finding->text();
  }
};

TEST_F(ExpertFaultsTest, WithoutAFaultNothingIsFound) {
  for (const Keys& more : {Keys{}, kBiased, Keys{"--training.moe_aux_loss_coeff=1", "--training.moe_z_loss_coeff=1"}}) {
    const LayoutCheck found = check([](nn::MixtureOfExperts&, int) {}, more);
    EXPECT_FALSE(found.finding) << found.finding->text();
    EXPECT_EQ(found.steps.size(), 3U);
  }
}

TEST_F(ExpertFaultsTest, RoutersWithNoiseACapacityAndAnyUnitOfTheLossAreRight) {
  for (const char* unit : {"sequence", "micro_batch", "global_batch"}) {
    expect_right({"--training.moe_aux_loss_coeff=1", "--training.moe_aux_loss_unit=" + std::string(unit)});
  }
  expect_right({"--training.moe_input_jitter_eps=0.2"});
  expect_right({"--training.moe_expert_capacity_factor=0.75"});
}

// No rank ever has the sequences that are counted together in one of two passes of four data ranks.
TEST_F(ExpertFaultsTest, WhatNoSingleRankComputesIsRefused) {
  const Keys keys = {"--training.moe_aux_loss_coeff=1", "--training.moe_aux_loss_unit=global_batch",
                     "--training.local_batch_size=1"};
  try {
    check([](nn::MixtureOfExperts&, int) {}, keys);
    ADD_FAILURE() << "not refused";
  } catch (const ConfigError& e) {
    EXPECT_THAT(e.what(), HasSubstr("4 data ranks together in each of their 2 forward passes"));
    EXPECT_THAT(e.what(), HasSubstr("local_batch_size = 2"));
  }
}

TEST_F(ExpertFaultsTest, ALossOfEachUnitThatIsAddedTwiceIsFound) {
  for (const char* unit : {"sequence", "micro_batch", "global_batch"}) {
    expect_found(check(
                     [](nn::MixtureOfExperts& mixture, int) {
                       mixture.add_pre_forward_hook([](nn::Module& module) {
                         auto& twice = dynamic_cast<nn::MixtureOfExperts&>(module);
                         nn::RouterLosses losses = twice.losses();
                         losses.load_weight = 2.0 / 8;
                         twice.set_losses(std::move(losses));
                       });
                     },
                     {"--training.moe_aux_loss_coeff=1", "--training.moe_aux_loss_unit=" + std::string(unit)}),
                 "layers.1.moe.gate.weight");
  }
}

// Each rank then evens out the load of its own tokens alone.
TEST_F(ExpertFaultsTest, CountsOfTheGlobalBatchThatAreNotSummedAreFound) {
  expect_found(check(
                   [](nn::MixtureOfExperts& mixture, int) {
                     mixture.add_pre_forward_hook([](nn::Module& module) {
                       auto& alone = dynamic_cast<nn::MixtureOfExperts&>(module);
                       nn::RouterLosses losses = alone.losses();
                       losses.sum_counts = nullptr;
                       alone.set_losses(std::move(losses));
                     });
                   },
                   {"--training.moe_aux_loss_coeff=1", "--training.moe_aux_loss_unit=global_batch"}),
               "layers.1.moe.gate.weight");
}

TEST_F(ExpertFaultsTest, NoiseOfOtherTokensIsFound) {
  const LayoutCheck found = check(
      [](nn::MixtureOfExperts& mixture, int rank) {
        if (rank != 2) return;
        mixture.add_pre_forward_hook([](nn::Module& module) {
          auto& shifted = dynamic_cast<nn::MixtureOfExperts&>(module);
          nn::RouterJitter jitter = shifted.jitter();
          jitter.place.first_row = 0;  // as if each rank counted its rows from 0
          shifted.set_jitter(std::move(jitter));
        });
      },
      {"--training.moe_input_jitter_eps=0.2"});
  // Its tokens go where one rank sends them, with other weights: the first output that is wrong is the mixture's.
  expect_found(found, "layers.1.moe.");
  EXPECT_EQ(found.finding->rank, 2);
}

// A rank whose experts take fewer tokens, and a rank that counts its own positions of a sequence alone.
TEST_F(ExpertFaultsTest, TokensThatAreLostAtCapacityAreFound) {
  const Keys limited = {"--training.moe_expert_capacity_factor=1"};
  Keys cut = limited;
  cut.insert(cut.end(), {"--parallelism.data_parallel_shard_degree=2", "--parallelism.context_parallel_degree=2",
                         "--training.local_batch_size=4"});
  const auto with = [](const std::function<void(nn::ExpertCapacity&)>& change) {
    return [change](nn::MixtureOfExperts& mixture, int rank) {
      mixture.add_pre_forward_hook([change, rank](nn::Module& module) {
        auto& other = dynamic_cast<nn::MixtureOfExperts&>(module);
        nn::ExpertCapacity capacity = other.capacity();
        if (rank == 3 || capacity.cut.ranks > 1) change(capacity);
        other.set_capacity(std::move(capacity));
      });
    };
  };
  expect_found(check(with([](nn::ExpertCapacity& capacity) { capacity.factor = 0.5; }), limited), "layers.1.moe.");
  expect_found(check(with([](nn::ExpertCapacity& capacity) { capacity.sum_counts = [](const at::Tensor&) {}; }), cut),
               "layers.1.moe.");
}

// As where an expert without a token in a step is left out, and with it the step of its weights. All tokens are the
// same, so they choose the same two of a layer's experts.
TEST_F(ExpertFaultsTest, AnEmptyExpertThatIsSkippedIsFound) {
  write_tokens("tokens.bin", std::vector<std::uint16_t>(6000, 7));
  EXPECT_FALSE(check([](nn::MixtureOfExperts&, int) {}).finding);
  const LayoutCheck found = check_side(
      {}, [](LayoutSide&, int) {},
      [](std::int64_t, const std::vector<NamedTensor>& parameters) {
        for (const NamedTensor& one : parameters) {
          at::Tensor& gradient = one.tensor.mutable_grad();
          const bool is_of_expert = models::is_expert_parameter(one.name) && one.name.starts_with("layers.1.");
          if (is_of_expert && gradient.defined() && gradient.count_nonzero().item<std::int64_t>() == 0)
            gradient.reset();
        }
      });
  expect_found(found, "layers.1.moe.experts.");
  EXPECT_EQ(found.finding->what, "update");
}

TEST_F(ExpertFaultsTest, ALossOfTheRouterThatIsAddedTwiceIsFound) {
  // Of 8 sequences, or of their 256 tokens.
  const nn::RouterLosses aux{.load_weight = 2.0 / 8}, z{.z_weight = 2.0 / 256};
  for (const auto& [twice, key] : {std::pair(aux, "moe_aux_loss_coeff"), std::pair(z, "moe_z_loss_coeff")}) {
    expect_found(check(
                     [&, twice = twice](nn::MixtureOfExperts& mixture, int) {
                       mixture.add_pre_forward_hook([twice](nn::Module& module) {
                         dynamic_cast<nn::MixtureOfExperts&>(module).set_losses(twice);
                       });
                     },
                     {"--training." + std::string(key) + "=1"}),
                 "layers.1.moe.gate.weight");
  }
}

TEST_F(ExpertFaultsTest, ABiasThatStaysAsItWasIsFound) {
  const at::Tensor stale = at::zeros({8});
  const LayoutCheck found = check_side(
      kBiased, [&](LayoutSide& side, int) { replace_bias(side, [stale](const at::Tensor&) { return stale; }); });
  expect_found(found, "layers.1.moe.expert_bias");
  EXPECT_EQ(found.finding->what, "choice of experts");
}

// Its gradients are right: tokens go where one rank sends them.
TEST_F(ExpertFaultsTest, ABiasThatOneRankGivesToOtherExpertsIsFound) {
  const LayoutCheck found = check_side(kBiased, [&](LayoutSide& side, int rank) {
    if (rank == 3) replace_bias(side, [](const at::Tensor& bias) { return at::roll(bias, 1, 0); });
  });
  expect_found(found, "layers.1.moe.expert_bias");
  EXPECT_EQ(found.finding->what, "choice of experts");
  EXPECT_EQ(found.finding->rank, 3);
}

// Logits that all grow by the same number give the same scores: no gradient and no choice tells.
TEST_F(ExpertFaultsTest, LogitsThatAreOthersAreFoundByThemselves) {
  const LayoutCheck found = check([](nn::MixtureOfExperts& mixture, int rank) {
    if (rank != 1) return;
    mixture.gate->add_post_forward_hook([](nn::Module&, const at::Tensor& out) { return out + 0.5; });
  });
  expect_found(found, "layers.1.moe.gate.weight");
  EXPECT_EQ(found.finding->what, "router logits");
  EXPECT_EQ(found.finding->rank, 1);
}

// Also where a block is computed again, though its logits are then not equal to themselves.
TEST_F(ExpertFaultsTest, ANaNInTheGateOfOneRankIsFoundThere) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const Keys& more : {Keys{}, Keys{"--activation_checkpoint.mode=full"}}) {
    const LayoutCheck found = check(
        [](nn::MixtureOfExperts& mixture, int rank) {
          if (rank != 1) return;
          mixture.gate->set_parameter_use("weight", [](const at::Tensor& weight) { return weight * kNan; });
        },
        more);
    expect_found(found, "layers.1.");
    EXPECT_EQ(found.finding->rank, 1) << found.finding->text();
    EXPECT_FALSE(std::isfinite(found.finding->difference.relative)) << found.finding->text();
  }
  EXPECT_EQ((RoutingDifference{.squares = kNan, .reference_squares = 1}).relative(),
            std::numeric_limits<double>::infinity());
}

// As where a block that is computed again counts once more, or a rank does not add its tokens.
TEST_F(ExpertFaultsTest, TokensThatAreCountedTwiceOrNotAtAllAreFound) {
  for (const std::int64_t times : {2, 0}) {
    const LayoutCheck found = check_side(kBiased, [&](LayoutSide& side, int rank) {
      if (times == 0 && rank != 2) return;
      const at::Tensor counts = side.model->expert_load()->counts()[1];
      mixture_of(side).add_post_forward_hook([counts, times](nn::Module&, const at::Tensor& out) {
        counts.mul_(times);
        return out;
      });
    });
    expect_found(found, "layers.1.moe.expert_bias");
    EXPECT_EQ(found.finding->what, "load of experts");
    EXPECT_THAT(found.finding->cause, HasSubstr(times == 2 ? "more than once" : "not counted"));
  }
}

TEST_F(ExpertFaultsTest, ANormWithoutExpertsIsFound) {
  const LayoutCheck found = check_side({}, [](LayoutSide& side, int) {
    std::vector<NamedTensor> others = side.model->parameters();
    std::erase_if(others, [](const NamedTensor& one) { return models::is_expert_parameter(one.name); });
    side.optimizer_step = std::make_unique<train::OptimizerStep>(config::parse_config("", "test", Keys{}), others,
                                                                 side.model->grad_norm_group());
  });
  ASSERT_TRUE(found.finding);
  EXPECT_EQ(found.finding->what, "gradient norm") << found.finding->text();
  EXPECT_LT(found.finding->difference.found, found.finding->difference.expected);
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
