// Training with experts that are divided among ranks gives the run of one rank, which has all of them.
#include <algorithm>
#include <cmath>

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/train/model/expert_load.h"
#include "phalanx/train/testing/expert_biases.h"
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
  /// Trains in two of these layouts, or all, which must have the losses and gradient norms of the run `one`, and its
  /// validation loss. Returns those in which it has trained.
  std::vector<Layout> expect_as(const std::string& one, const std::vector<Layout>& layouts, double norm_tolerance) {
    const std::vector<double> expected = losses(one), norms = values_of(one, "grad_norm"),
                              validation = values_of(one, "validation_loss");
    const std::vector<Layout> drawn = sampled(layouts, 2);
    for (const Layout& layout : drawn) {
      SCOPED_TRACE(layout.name);
      train(config_of(layout, layout.name), layout.ranks);
      expect_same_losses(losses(layout.name), expected);
      expect_near(values_of(layout.name, "validation_loss"), validation, kLossTolerance);
      expect_near(values_of(layout.name, "grad_norm"), norms, norm_tolerance);
    }
    return drawn;
  }
  static void expect_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << i;
  }
  /// Fails unless a logged gradient norm and a loss of two runs differ by far more than layouts may.
  void expect_others(const std::string& one, const std::string& other) const {
    const auto largest = [](const std::vector<double>& a, const std::vector<double>& b) {
      double most = 0;
      for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
        most = std::max(most, std::abs(a[i] - b[i]) / a[i]);
      return most;
    };
    EXPECT_GT(largest(values_of(one, "grad_norm"), values_of(other, "grad_norm")), 5e-3) << other;
    EXPECT_GT(largest(losses(one), losses(other)), 50 * kLossTolerance) << other;
  }
  /// Those that share a step's tokens in every way, with these keys.
  std::vector<Layout> layouts_of_tokens(const std::vector<std::string>& settings) const {
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.end(), settings.begin(), settings.end());
      return more;
    };
    return {
        {.name = "ddp2_accumulated", .ranks = 2, .keys = keys(1, with({"--training.local_batch_size=2"}))},
        {.name = "zero3_4_ep2_recomputed",
         .ranks = 4,
         .keys = sharded_keys(2, 3, 4, with({"--activation_checkpoint.mode=full"}))},
        {.name = "cp2", .ranks = 2, .keys = keys(1, settings), .cp = 2},
        {.name = "zero3_2_cp2_ep4_tp2", .ranks = 8, .tp = 2, .keys = sharded_keys(4, 3, 2, settings), .cp = 2},
        {.name = "tp2", .ranks = 2, .tp = 2, .keys = keys(1, settings)},
        {.name = "pp2_zbv_recomputed",
         .ranks = 2,
         .pp = 2,
         .keys = keys(
             1, with({"--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--activation_checkpoint.mode=full"}))},
        {.name = "pp2_cp2_dualpipev_recomputed",
         .ranks = 4,
         .pp = 2,
         .keys =
             keys(1, with({"--parallelism.pipeline_parallel_schedule=DualPipeV", "--activation_checkpoint.mode=full"})),
         .cp = 2}};
  }
  at::Tensor biases_of(const std::string& run) const { return expert_biases_of(path(run), {0, 1}); }
};

// A sequence is the same in every layout, however it is cut and wherever it is computed.
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
      {.name = "cp2", .ranks = 2, .keys = keys(1, balanced), .cp = 2},
      {.name = "zero3_2_cp2_ep4_tp2", .ranks = 8, .tp = 2, .keys = sharded_keys(4, 3, 2, balanced), .cp = 2},
      {.name = "pp2", .ranks = 2, .pp = 2, .keys = keys(1, balanced)}};
  expect_as("one", layouts, 1e-4);
  EXPECT_THAT(refusal<ConfigError>(config_of({}, "dense", balanced)),
              AllOf(HasSubstr("[training] moe_aux_loss_coeff = 1"), HasSubstr("the model has none: remove it")));
}

// One rank that has the same micro-batches one after the other.
TEST_F(TrainerExpertsTest, ALossOfMicroBatchesIsThatOfOneRankWithTheSameOnes) {
  const std::vector<std::string> of_two = {"--training.moe_aux_loss_coeff=1",
                                           "--training.moe_aux_loss_unit=micro_batch", "--training.local_batch_size=2",
                                           "--parallelism.pipeline_parallel_microbatch_size=2"};
  const auto with = [&](const char* more) {
    std::vector<std::string> all = of_two;
    all.emplace_back(more);
    return all;
  };
  train(config_of({.keys = keys(1, {"--training.moe_aux_loss_coeff=1"})}, "of_sequences"), 1);
  train(config_of({.keys = keys(1, of_two)}, "one"), 1);
  const double norm = values_of("one", "grad_norm").back();
  EXPECT_GT(std::abs(norm - values_of("of_sequences", "grad_norm").back()), 1e-3 * norm);
  const std::vector<Layout> layouts = {
      {.name = "ddp4", .ranks = 4, .keys = keys(1, of_two)},
      {.name = "zero3_2_ep2_recomputed",
       .ranks = 2,
       .keys = sharded_keys(2, 3, 2, with("--activation_checkpoint.mode=full"))},
      {.name = "tp2", .ranks = 2, .tp = 2, .keys = keys(1, of_two)},
      {.name = "zero3_2_cp2_ep4_tp2", .ranks = 8, .tp = 2, .keys = sharded_keys(4, 3, 2, of_two), .cp = 2},
      {.name = "pp2_zero3_2_ep2", .ranks = 4, .pp = 2, .keys = sharded_keys(2, 3, 2, of_two)}};
  expect_as("one", layouts, 1e-4);
}

// One rank with the global batch in one pass. The data ranks sum what they count.
TEST_F(TrainerExpertsTest, ALossOfTheGlobalBatchIsTheSameInEveryLayoutWithOnePassAStep) {
  const std::vector<std::string> global = {"--training.moe_aux_loss_coeff=1",
                                           "--training.moe_aux_loss_unit=global_batch"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), global.begin(), global.end());
    return more;
  };
  train(config_of({.keys = keys(1, {"--training.moe_aux_loss_coeff=1"})}, "of_sequences"), 1);
  train(config_of({.keys = keys(1, global)}, "one"), 1);
  const double norm = values_of("one", "grad_norm").back();
  EXPECT_GT(std::abs(norm - values_of("of_sequences", "grad_norm").back()), 1e-3 * norm);
  const std::vector<Layout> layouts = {
      {.name = "ddp2", .ranks = 2, .keys = keys(1, global)},
      {.name = "zero3_4_ep2_recomputed",
       .ranks = 4,
       .keys = sharded_keys(2, 3, 4, with({"--activation_checkpoint.mode=full"}))},
      {.name = "hsdp2x2_ep2",
       .ranks = 4,
       .keys = sharded_keys(2, 3, 2, with({"--parallelism.data_parallel_replicate_degree=2"}))},
      {.name = "tp2", .ranks = 2, .tp = 2, .keys = keys(1, global)},
      {.name = "cp2", .ranks = 2, .keys = keys(1, global), .cp = 2},
      {.name = "zero3_2_cp2_ep4_tp2", .ranks = 8, .tp = 2, .keys = sharded_keys(4, 3, 2, global), .cp = 2},
      {.name = "pp2_in_one_pass",
       .ranks = 2,
       .pp = 2,
       .keys = keys(1, with({"--parallelism.pipeline_parallel_schedule=GPipe",
                             "--parallelism.pipeline_parallel_microbatch_size=8"}))},
      {.name = "pp2_zero3_2_ep2_in_one_pass",
       .ranks = 4,
       .pp = 2,
       .keys = sharded_keys(2, 3, 2,
                            with({"--parallelism.pipeline_parallel_schedule=GPipe",
                                  "--parallelism.pipeline_parallel_microbatch_size=4"}))}};
  expect_as("one", layouts, 1e-4);
  // Of several passes each counts by itself: then it is the loss of a micro-batch, on one data rank.
  const std::vector<std::string> in_parts = {"--training.local_batch_size=2", "--training.moe_aux_loss_coeff=1"};
  std::vector<std::string> of_two = in_parts;
  of_two.emplace_back("--training.moe_aux_loss_unit=micro_batch");
  train(config_of({.keys = keys(1, of_two)}, "of_two"), 1);
  std::vector<std::string> accumulated = in_parts;
  accumulated.emplace_back("--training.moe_aux_loss_unit=global_batch");
  expect_as("of_two", {{.name = "accumulated", .keys = keys(1, accumulated)}}, 1e-4);
  EXPECT_THAT(
      refusal<ConfigError>(config_of({.keys = keys(1, {"--training.moe_aux_loss_unit=global_batch"})}, "weightless")),
      AllOf(HasSubstr("moe_aux_loss_unit"), HasSubstr("set moe_aux_loss_coeff")));
}

// No run on one rank has these passes. This one ends, and another one has its bits.
TEST_F(TrainerExpertsTest, ALossOfTheGlobalBatchInSeveralPassesOfAPipelineIsTheSameInEveryRun) {
  const std::vector<std::string> global = {"--training.moe_aux_loss_coeff=1",
                                           "--training.moe_aux_loss_unit=global_batch"};
  const Layout layout = {.ranks = 4, .pp = 2, .keys = sharded_keys(2, 3, 2, global)};
  for (const char* run : {"first", "second"}) train(config_of(layout, run), layout.ranks);
  EXPECT_FALSE(losses("first").empty());
  EXPECT_EQ(losses("first"), losses("second"));
  EXPECT_EQ(values_of("first", "grad_norm"), values_of("second", "grad_norm"));
}

// The noise of a number does not depend on who has a token, in which pass, and whether it is computed again.
TEST_F(TrainerExpertsTest, TheNoiseOfRoutersIsTheSameInEveryLayout) {
  const std::vector<std::string> noisy = {"--training.moe_input_jitter_eps=0.5"};
  train(config_of({.keys = keys(1)}, "plain"), 1);
  train(config_of({.keys = keys(1, noisy)}, "one"), 1);
  expect_others("one", "plain");
  expect_as("one", layouts_of_tokens(noisy), 1e-3);
  EXPECT_THAT(refusal<ConfigError>(config_of({}, "dense", noisy)), HasSubstr("moe_input_jitter_eps = 0.5"));
}

// Every layout drops the same tokens, and says how many.
TEST_F(TrainerExpertsTest, ACapacityDropsTheSameTokensInEveryLayout) {
  const std::vector<std::string> limited = {"--training.moe_expert_capacity_factor=0.75"};
  train(config_of({.keys = keys(1)}, "dropless"), 1);
  train(config_of({.keys = keys(1, limited)}, "one"), 1);
  expect_others("one", "dropless");
  EXPECT_TRUE(lines_with("dropless", "expert_dropped").empty());
  const std::vector<double> dropped = values_of("one", "expert_dropped");
  ASSERT_EQ(dropped.size(), 3U);  // of steps 1, 10 and 12, which are logged
  for (const double share : dropped) {
    EXPECT_GE(share, 0.25);  // experts take three quarters of what they would take of an even load
    EXPECT_LT(share, 0.75);
  }
  for (const Layout& layout : expect_as("one", layouts_of_tokens(limited), 1e-3)) {
    EXPECT_EQ(values_of(layout.name, "expert_dropped"), dropped) << layout.name;
  }
  write_documents();
  EXPECT_THAT(refusal<ConfigError>(config_of(
                  {.keys = keys(1, limited)}, "documents",
                  {"--training.dataset_path=" + path("documents"), "--training.attn_mask_type=block_causal"})),
              AllOf(HasSubstr("moe_expert_capacity_factor = 0.75"), HasSubstr("as [sft] and [dpo] set it"),
                    HasSubstr("expected 0")));
}

// The layouts that share a step's tokens in every way.
TEST_F(TrainerExpertsTest, ABiasAndAZLossAreTheSameInEveryLayout) {
  const std::vector<std::string> settings = {"--training.moe_router_enable_expert_bias",
                                             "--training.moe_router_bias_update_rate=0.01",
                                             "--training.moe_z_loss_coeff=0.1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), settings.begin(), settings.end());
    return more;
  };
  train(config_of({.keys = keys(1)}, "plain"), 1);
  train(config_of({.keys = keys(1, settings)}, "one"), 1);
  const double validation = result_.validation_loss.value();
  const std::vector<double> expected = losses("one"), norms = values_of("one", "grad_norm");
  EXPECT_GT(std::abs(norms.front() - values_of("plain", "grad_norm").front()), 1e-4 * norms.front());
  const at::Tensor biases = biases_of("one");
  EXPECT_GT(biases.abs().max().item<double>(), 0.01);
  const std::vector<double> uneven = values_of("one", "expert_load_max");
  EXPECT_EQ(uneven.size(), 3U);  // of steps 1, 10 and 12, which are logged
  EXPECT_TRUE(at::allclose(biases * 100, (biases * 100).round(), 0, 1e-3));
  const std::vector<Layout> layouts = {
      {.name = "ddp2", .ranks = 2, .keys = keys(1, settings)},
      {.name = "accumulated", .ranks = 2, .keys = sharded_keys(2, 2, 2, with({"--training.local_batch_size=1"}))},
      {.name = "zero3_4_ep2_recomputed",
       .ranks = 4,
       .keys = sharded_keys(2, 3, 4, with({"--activation_checkpoint.mode=full"}))},
      {.name = "recomputed_by_operation",
       .keys =
           keys(1, with({"--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"}))},
      {.name = "hsdp2x2_ep2",
       .ranks = 4,
       .keys = sharded_keys(2, 3, 2, with({"--parallelism.data_parallel_replicate_degree=2"}))},
      {.name = "cp2", .ranks = 2, .keys = keys(1, settings), .cp = 2},
      {.name = "zero3_2_cp2_ep4_tp2", .ranks = 8, .tp = 2, .keys = sharded_keys(4, 3, 2, settings), .cp = 2},
      {.name = "tp2", .ranks = 2, .tp = 2, .keys = keys(1, settings)},
      {.name = "pp2_zero3_2_ep2", .ranks = 4, .pp = 2, .keys = sharded_keys(2, 3, 2, settings)},
      {.name = "pp2_zbv_recomputed",
       .ranks = 2,
       .pp = 2,
       .keys = keys(
           1, with({"--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--activation_checkpoint.mode=full"}))}};
  for (const Layout& layout : sampled(layouts, 3)) {
    SCOPED_TRACE(layout.name);
    train(config_of(layout, layout.name), layout.ranks);
    expect_same_losses(losses(layout.name), expected);
    EXPECT_NEAR(result_.validation_loss.value(), validation, kLossTolerance * validation);
    const std::vector<double> found = values_of(layout.name, "grad_norm");
    for (std::size_t i = 0; i < norms.size(); ++i) EXPECT_NEAR(found[i], norms[i], 1e-3 * norms[i]) << i;
    EXPECT_TRUE(at::equal(biases_of(layout.name), biases)) << biases_of(layout.name) << biases;
    EXPECT_EQ(values_of(layout.name, "expert_load_max"), uneven);
  }
}

TEST_F(TrainerExpertsTest, BiasesAreSavedAndGoOnInAnyLayout) {
  const std::vector<std::string> settings = {"--training.moe_router_enable_expert_bias",
                                             "--training.moe_router_bias_update_rate=0.02"};
  const auto with = [&](const char* steps) {
    std::vector<std::string> more = settings;
    more.emplace_back(steps);
    return more;
  };
  const std::vector<Layout> layouts = {{.ranks = 4, .keys = sharded_keys(4, 3, 4, with("--training.steps=4"))},
                                       {.ranks = 4, .pp = 2, .keys = sharded_keys(2, 3, 2, with("--training.steps=8"))},
                                       {.ranks = 1, .keys = keys(1, with("--training.steps=12"))}};
  for (const Layout& layout : layouts) {
    train(config_of(layout, "parts", {"--lr_scheduler.decay_ratio=0"}), layout.ranks);
  }
  train(config_of({.keys = keys(1, settings)}, "same", {"--lr_scheduler.decay_ratio=0"}), 1);
  expect_same_losses(losses("parts"), losses("same"));
  EXPECT_TRUE(at::equal(biases_of("parts"), biases_of("same")));
  // They are needed where experts are chosen, so a run cannot go on without them; it may leave them as they are.
  EXPECT_THAT(refusal<CheckpointError>(config_of({.keys = keys(1)}, "parts", {"--training.steps=14"})),
              HasSubstr("moe_router_enable_expert_bias"));
  train(config_of({.keys = keys(1)}, "parts",
                  {"--training.steps=14", "--training.moe_router_enable_expert_bias",
                   "--training.moe_router_bias_update_rate=0"}),
        1);
  EXPECT_TRUE(at::equal(biases_of("parts"), biases_of("same")));
  // A new run that begins with these weights likewise.
  const auto begins = [&](std::vector<std::string> more) {
    std::vector<std::string> all = mixture();
    all.pop_back();
    all.insert(all.end(), {"--checkpoint.initial_load_path=" + path("parts") + "/checkpoint", "--training.steps=1",
                           "--optimizer.lr=0"});
    all.insert(all.end(), more.begin(), more.end());
    return config_of({.keys = all}, "new");
  };
  EXPECT_THAT(refusal<CheckpointError>(begins({})),
              AllOf(HasSubstr("trained with biases"), HasSubstr("moe_router_enable_expert_bias = true")));
  train(begins({"--training.moe_router_enable_expert_bias", "--training.moe_router_bias_update_rate=0"}), 1);
  EXPECT_TRUE(at::equal(biases_of("new"), biases_of("same")));
}

// The numbers of a logged step from the experts that were chosen in it: two layers of 8 experts, 256 tokens, two each.
TEST_F(TrainerExpertsTest, TheLogSaysHowUnevenTheLoadIs) {
  train(config_of({.ranks = 2, .keys = sharded_keys(2, 3, 2, {"--training.steps=1"})}, "run"), 2);
  const auto lines = lines_with("run", "expert_load");
  ASSERT_EQ(lines.size(), 1U);
  const auto layers = lines[0]["expert_load"].get<std::vector<double>>();
  ASSERT_EQ(layers.size(), static_cast<std::size_t>(models::llama_flavor("debug").n_layers));
  for (const double layer : layers) {
    EXPECT_GE(layer, 1);
    EXPECT_LE(layer, 4);
    EXPECT_NEAR(layer * 64, std::round(layer * 64), 1e-9);  // the mean is 64
  }
  EXPECT_EQ(lines[0]["expert_load_max"].get<double>(), *std::ranges::max_element(layers));
  EXPECT_EQ(fullest_by_mean({1, 2, 3, 6, 0, 0, 0, 0, 5, 5, 5, 5}, 4), std::vector<double>({2, 0, 1}));
  train(config_of({}, "dense", {"--training.steps=1"}), 1);
  EXPECT_TRUE(lines_with("dense", "expert_load").empty());
  // The first layer of this family has no experts, and no part in the mean.
  const auto model = models::llama_flavor("debug", models::LlamaFamily::deepseek_v3);
  ASSERT_GT(model.dense_layers, 0);
  train(config_of({.keys = {"--model.name=deepseek_v3", "--training.steps=1"}}, "partly_dense"), 1);
  const auto partly = lines_with("partly_dense", "expert_load");
  ASSERT_EQ(partly.size(), 1U);
  EXPECT_EQ(partly[0]["expert_load"].size(), static_cast<std::size_t>(model.n_layers - model.dense_layers));
  EXPECT_GE(partly[0]["expert_load_mean"].get<double>(), 1);
}

// In float16 with a loss scale that overflows no weight changes, and no bias.
TEST_F(TrainerExpertsTest, AStepThatIsSkippedMovesNoBias) {
  const std::vector<std::string> settings = {"--training.moe_router_enable_expert_bias",
                                             "--training.mixed_precision_param=float16", "--training.steps=2",
                                             "--training.initial_loss_scale=1e30"};
  train(config_of({.keys = keys(1, settings)}, "run"), 1);
  EXPECT_EQ(lines_with("run", "skipped").size(), 2U);
  EXPECT_EQ(biases_of("run").abs().max().item<double>(), 0);

  // A scale that overflows at first and is halved until it does not: the steps behind that move the biases.
  constexpr int kSteps = 24;
  constexpr double kRate = 0.01;
  train(config_of(
            {.keys = keys(1, {"--training.moe_router_enable_expert_bias", "--training.moe_router_bias_update_rate=0.01",
                              "--training.mixed_precision_param=float16", "--training.initial_loss_scale=1e10",
                              "--training.steps=" + std::to_string(kSteps)})},
            "halved"),
        1);
  const auto skipped = static_cast<int>(lines_with("halved", "skipped").size());
  EXPECT_GT(skipped, 2);
  ASSERT_LT(skipped, kSteps - 2);
  const double farthest = biases_of("halved").abs().max().item<double>();
  EXPECT_GT(farthest, kRate / 2);
  EXPECT_LT(farthest, kRate * (kSteps - skipped) + kRate / 2);
}

TEST_F(TrainerExpertsTest, WhatABiasOrAZLossDoesNotGoWithIsRefused) {
  const std::string bias = "--training.moe_router_enable_expert_bias";
  const auto refused = [&](std::vector<std::string> more, const Layout& layout = {}) {
    Layout with = layout;
    with.keys = keys(1, std::move(more));
    return refusal<ConfigError>(config_of(with, "run"), layout.ranks);
  };
  EXPECT_THAT(refusal<ConfigError>(config_of({}, "run", {bias})), HasSubstr("the model has none: remove it"));
  EXPECT_THAT(refusal<ConfigError>(config_of({}, "run", {"--training.moe_z_loss_coeff=0.1"})),
              AllOf(HasSubstr("moe_z_loss_coeff = 0.1"), HasSubstr("the model has none: remove it")));
  EXPECT_THAT(refused({"--training.moe_router_bias_update_rate=0.1"}),
              AllOf(HasSubstr("moe_router_bias_update_rate = 0.1"), HasSubstr("moe_router_enable_expert_bias = true")));
  EXPECT_THAT(refused({bias, "--checkpoint.last_save_in_hf"}), HasSubstr("last_save_in_hf"));
  EXPECT_THAT(refused({bias, "--lora.rank=4"}), HasSubstr("[lora] rank"));
  EXPECT_THAT(refused({bias, "--training.seq_len=30"}, {.ranks = 2, .cp = 2}),
              AllOf(HasSubstr("pads sequences of 30 to 32"), HasSubstr("multiple of 4")));
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
  for (const Layout& layout : sampled(layouts, 5)) {
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
