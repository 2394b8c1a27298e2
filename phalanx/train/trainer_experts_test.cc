// Training with experts that are divided among ranks gives the run of one rank, which has all of them.
#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class TrainerExpertsTest : public TrainerTest {
 protected:
  std::vector<std::string> keys(std::int64_t ep, std::vector<std::string> more = {}) const {
    const std::vector<std::string> model = mixture();
    more.insert(more.end(), model.begin(), model.end());
    more.push_back("--parallelism.expert_parallel_degree=" + std::to_string(ep));
    return more;
  }
  std::vector<std::string> sharded_keys(std::int64_t ep, int stage, int shards,
                                        std::vector<std::string> more = {}) const {
    const std::vector<std::string> cut = sharded(stage, shards);
    more.insert(more.end(), cut.begin(), cut.end());
    return keys(ep, std::move(more));
  }
};

TEST_F(TrainerExpertsTest, ALossThatEvensOutTheLoadIsTheSameInEveryLayout) {
  const std::vector<std::string> balanced = {"--training.moe_aux_loss_coeff=1"};
  train(config_of({.keys = keys(1)}, "unbalanced"), 1);
  train(config_of({.keys = keys(1, balanced)}, "one"), 1);
  const std::vector<double> expected = losses("one"), norms = values_of("one", "grad_norm");
  EXPECT_GT(std::abs(norms.back() - values_of("unbalanced", "grad_norm").back()), 1e-3 * norms.back());
  const std::vector<Layout> layouts = {
      {.name = "ddp2", .ranks = 2, .keys = keys(1, balanced)},
      {.name = "zero3_4_ep2_recomputed",
       .ranks = 4,
       .keys = sharded_keys(2, 3, 4, {"--training.moe_aux_loss_coeff=1", "--activation_checkpoint.mode=full"})},
      {.name = "accumulated",
       .ranks = 2,
       .keys = sharded_keys(2, 1, 2, {"--training.moe_aux_loss_coeff=1", "--training.local_batch_size=1"})},
      {.name = "tp2", .ranks = 2, .tp = 2, .keys = keys(1, balanced)},
      {.name = "zero3_2_ep2_tp2", .ranks = 4, .tp = 2, .keys = sharded_keys(2, 3, 2, balanced)},
      {.name = "pp2", .ranks = 2, .pp = 2, .keys = keys(1, balanced)}};
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(layout.name);
    train(config_of(layout, layout.name), layout.ranks);
    expect_same_losses(losses(layout.name), expected);
    const std::vector<double> found = values_of(layout.name, "grad_norm");
    ASSERT_EQ(found.size(), norms.size());
    for (std::size_t i = 0; i < norms.size(); ++i) EXPECT_NEAR(found[i], norms[i], 1e-4 * norms[i]) << i;
  }
  EXPECT_THAT(refusal<ConfigError>(config_of({}, "dense", balanced)),
              AllOf(HasSubstr("[training] moe_aux_loss_coeff = 1"), HasSubstr("the model has none: remove it")));
}

TEST_F(TrainerExpertsTest, TrainsAsOneRankDoes) {
  train(config_of({.keys = keys(1)}, "one"), 1);
  const double validation = result_.validation_loss.value();
  const std::vector<double> expected = losses("one"), norms = values_of("one", "grad_norm");
  const std::vector<Layout> layouts = {
      {.name = "zero3_2_ep2", .ranks = 2, .keys = sharded_keys(2, 3, 2)},
      {.name = "zero1_4_ep2", .ranks = 4, .keys = sharded_keys(2, 1, 4)},
      {.name = "zero3_4_ep4", .ranks = 4, .keys = sharded_keys(4, 3, 4)},
      {.name = "zero2_8_ep2", .ranks = 8, .keys = sharded_keys(2, 2, 8)},
      {.name = "hsdp2x2_ep2_accumulated",
       .ranks = 4,
       .keys =
           sharded_keys(2, 3, 2, {"--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=1"})},
      {.name = "zero3_4_ep2_recomputed",
       .ranks = 4,
       .keys = sharded_keys(2, 3, 4, {"--activation_checkpoint.mode=full"})},
      {.name = "zero3_2_ep2_offloaded", .ranks = 2, .keys = sharded_keys(2, 3, 2, {"--training.enable_cpu_offload"})},
      {.name = "zero3_4_ep2_kept_by_2",
       .ranks = 4,
       .keys = sharded_keys(2, 3, 4, {"--parallelism.fsdp_reshard_after_forward=2"})},
      {.name = "zero3_2_cp2_ep2", .ranks = 4, .keys = sharded_keys(2, 3, 2), .cp = 2},
      {.name = "zero3_2_cp2_ep4_tp2", .ranks = 8, .tp = 2, .keys = sharded_keys(4, 3, 2), .cp = 2},
      {.name = "zero3_2_ep2_tp2", .ranks = 4, .tp = 2, .keys = sharded_keys(2, 3, 2)},
      {.name = "zero3_4_ep2_tp2_whole_tokens",
       .ranks = 8,
       .tp = 2,
       .keys = sharded_keys(2, 3, 4, {"--parallelism.no-enable_sequence_parallel"})},
      {.name = "pp2_zero3_2_ep2", .ranks = 4, .pp = 2, .keys = sharded_keys(2, 3, 2)},
      {.name = "pp2_zero1_4_ep2_zbv",
       .ranks = 8,
       .pp = 2,
       .keys = sharded_keys(2, 1, 4, {"--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"})},
      {.name = "pp2_zero3_2_ep2_tp2_recomputed",
       .ranks = 8,
       .tp = 2,
       .pp = 2,
       .keys = sharded_keys(2, 3, 2,
                            {"--parallelism.fsdp_reshard_after_forward=always", "--activation_checkpoint.mode=full"})}};
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(layout.name);
    train(config_of(layout, layout.name), layout.ranks);
    expect_same_losses(losses(layout.name), expected);
    EXPECT_NEAR(result_.validation_loss.value(), validation, kLossTolerance * validation);
    const std::vector<double> found = values_of(layout.name, "grad_norm");
    ASSERT_EQ(found.size(), norms.size());
    for (std::size_t i = 0; i < norms.size(); ++i) EXPECT_NEAR(found[i], norms[i], 1e-3 * norms[i]) << i;
  }
}

// Adapters are trained, experts are not: they have no gradient and are not exchanged in a reduction.
TEST_F(TrainerExpertsTest, FrozenExpertsAreDividedToo) {
  const std::vector<std::string> adapters = {"--lora.rank=4", "--lora.no-zero_b"};
  train(config_of({.keys = keys(1, adapters)}, "one"), 1);
  train(config_of({.ranks = 4, .keys = sharded_keys(2, 3, 4, adapters)}, "ep2"), 4);
  train(config_of({.ranks = 4, .pp = 2, .keys = sharded_keys(2, 3, 2, adapters)}, "pp2_ep2"), 4);
  for (const char* run : {"ep2", "pp2_ep2"}) expect_same_losses(losses(run), losses("one"));
}

TEST_F(TrainerExpertsTest, AllExpertsOfALayerMayBeFrozenAndNotSome) {
  const auto frozen = [](const std::string& experts) {
    return std::vector<std::string>{"--training.frozen=tok_embeddings*,layers.0.attention*,layers.0.ffn_norm*," +
                                    ("layers.0.moe.experts." + experts)};
  };
  train(config_of({.keys = keys(1, frozen("*"))}, "one"), 1);
  train(config_of({.ranks = 4, .keys = sharded_keys(2, 3, 4, frozen("*"))}, "ep2"), 4);
  expect_same_losses(losses("ep2"), losses("one"));
  EXPECT_THAT(
      refusal<ConfigError>(config_of({.ranks = 2, .keys = sharded_keys(2, 3, 2, frozen("[0-3].*"))}, "some"), 2),
      AllOf(HasSubstr("[training] frozen names 'w1.weight' of some experts of layer 0"),
            HasSubstr("freeze all experts of the layer or none")));
}

// Losses change with the layout only as much as rounding to 16 bits allows.
TEST_F(TrainerExpertsTest, SixteenBitsAreNearOneRank) {
  const std::vector<std::string> narrow = {"--training.mixed_precision_param=bfloat16"};
  train(config_of({.keys = keys(1, narrow)}, "one"), 1);
  for (const std::int64_t ep : {2, 4}) {
    const std::string run = "ep" + std::to_string(ep);
    train(config_of({.ranks = 4, .keys = sharded_keys(ep, 3, 4, narrow)}, run), 4);
    const std::vector<double> expected = losses("one"), found = losses(run);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 5e-3 * expected[i]) << run << i;
  }
}

TEST_F(TrainerExpertsTest, ARunGoesOnWithAnotherDegree) {
  const std::vector<Layout> layouts = {{.ranks = 4, .keys = sharded_keys(4, 3, 4, {"--training.steps=4"})},
                                       {.ranks = 4, .pp = 2, .keys = sharded_keys(2, 3, 2, {"--training.steps=8"})},
                                       {.ranks = 1, .keys = keys(1, {"--training.steps=12"})}};
  for (const Layout& layout : layouts)
    train(config_of(layout, "parts", {"--lr_scheduler.decay_ratio=0"}), layout.ranks);
  train(config_of({.keys = keys(1)}, "same", {"--lr_scheduler.decay_ratio=0"}), 1);
  expect_same_losses(losses("parts"), losses("same"));
}

TEST_F(TrainerExpertsTest, AnExportHoldsEveryExpert) {
  const std::vector<std::string> exported = {"--checkpoint.last_save_in_hf", "--training.steps=2"};
  train(config_of({.keys = keys(1, exported)}, "one"), 1);
  train(config_of({.ranks = 4, .keys = sharded_keys(2, 3, 4, exported)}, "divided"), 4);
  const auto weights_after = [&](const std::string& run) {
    return train(config_of({.keys = {"--model.flavor=hf", "--model.hf_assets_path=" + path(run) + "/hf",
                                     "--checkpoint.initial_load_in_hf", "--optimizer.lr=0", "--training.steps=1"}},
                           run + "_again"),
                 1);
  };
  const Weights one = weights_after("one"), divided = weights_after("divided");
  ASSERT_EQ(one.size(), divided.size());
  for (const auto& [name, bytes] : one) {
    const auto* const a = reinterpret_cast<const float*>(bytes.data());
    const auto* const b = reinterpret_cast<const float*>(divided.at(name).data());
    ASSERT_EQ(bytes.size(), divided.at(name).size()) << name;
    for (std::size_t i = 0; i < bytes.size() / sizeof(float); ++i) ASSERT_NEAR(a[i], b[i], 1e-3) << name << " " << i;
  }
}

TEST_F(TrainerExpertsTest, ADegreeThatDoesNotFitIsRefusedWithThoseThatDo) {
  EXPECT_THAT(refusal<ConfigError>(config_of({.ranks = 4, .keys = sharded_keys(3, 3, 4)}, "run"), 4),
              AllOf(HasSubstr("[parallelism] expert_parallel_degree = 3"), HasSubstr("shard the model, 4, and"),
                    HasSubstr("8 experts"), HasSubstr("1, 2, 4")));
  EXPECT_THAT(refusal<ConfigError>(config_of({.ranks = 2, .keys = keys(2)}, "run"), 2),
              AllOf(HasSubstr("expert_parallel_degree = 2"), HasSubstr("shard the model, 1, and")));
  EXPECT_THAT(refusal<ConfigError>(
                  config_of({.ranks = 2, .keys = sharded(3, 2)}, "run", {"--parallelism.expert_parallel_degree=2"}), 2),
              HasSubstr("the model has no experts"));
}

}  // namespace
}  // namespace phalanx::train
