// Training with sequences that are cut over ranks gives the run of one rank.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train::trainer_context_test {
namespace {

const std::string kHeads = "--parallelism.context_parallel_exchange=heads";
const std::string kRing = "--parallelism.context_parallel_exchange=ring";

class TrainerContextTest : public TrainerTest {
 protected:
  void expect_same_run(const std::string& run, const std::string& other) const {
    expect_same_losses(losses(run), losses(other));
    const std::vector<double> norms = values_of(run, "grad_norm"), expected = values_of(other, "grad_norm");
    ASSERT_EQ(norms.size(), expected.size());
    for (std::size_t i = 0; i < norms.size(); ++i) EXPECT_NEAR(norms[i], expected[i], 1e-3 * expected[i]) << i;
    EXPECT_EQ(values_of(run, "tokens"), values_of(other, "tokens"));  // each of them is counted once
  }
};

TEST_F(TrainerContextTest, TrainsAsOneRankDoes) {
  train(config_of({.name = "one"}, "one"), 1);
  const double validation = result_.validation_loss.value();
  const std::vector<Layout> layouts = {
      {.name = "cp2", .ranks = 2, .cp = 2},
      {.name = "cp4_heads", .ranks = 4, .keys = {kHeads}, .cp = 4},
      {.name = "cp3", .ranks = 3, .cp = 3},
      {.name = "cp4_ring", .ranks = 4, .keys = {kRing}, .cp = 4},
      {.name = "cp3_alltoall", .ranks = 3, .keys = {"--parallelism.context_parallel_rotate_method=alltoall"}, .cp = 3},
      {.name = "cp2_ddp2_checked", .ranks = 4, .keys = {"--debug.replica_check_freq=1"}, .cp = 2},
      {.name = "cp2_zero3", .ranks = 2, .keys = sharded(3), .cp = 2},
      {.name = "cp2_zero2_2_checked",
       .ranks = 4,
       .keys = {"--parallelism.data_parallel_shard_degree=2", "--parallelism.zero_stage=2",
                "--debug.replica_check_freq=1"},
       .cp = 2},
      {.name = "cp2_tp2_zero3_2_recomputed",
       .ranks = 8,
       .tp = 2,
       .keys = {"--parallelism.data_parallel_shard_degree=2", "--activation_checkpoint.mode=full"},
       .cp = 2},
      {.name = "cp2_pp2_tp2", .ranks = 8, .tp = 2, .pp = 2, .cp = 2}};
  for (const Layout& layout : sampled(layouts, 5)) {
    SCOPED_TRACE(layout.name);
    train(config_of(layout, layout.name), layout.ranks);
    expect_same_run(layout.name, "one");
    EXPECT_NEAR(result_.validation_loss.value(), validation, kLossTolerance * validation);
  }
}

// 30 tokens over 4 ranks: two of padding.
TEST_F(TrainerContextTest, PaddingChangesNothing) {
  const std::string length = "--training.seq_len=30";
  train(config_of({.name = "one"}, "one", {length}), 1);
  const double validation = result_.validation_loss.value();
  const std::vector<Layout> layouts = {{.name = "cp4", .ranks = 4, .cp = 4},
                                       {.name = "cp4_heads", .ranks = 4, .keys = {kHeads}, .cp = 4},
                                       {.name = "cp4_ring", .ranks = 4, .keys = {kRing}, .cp = 4},
                                       {.name = "cp4_pp2", .ranks = 8, .pp = 2, .cp = 4},
                                       {.name = "cp4_tp2", .ranks = 8, .tp = 2, .cp = 4}};
  for (const Layout& layout : sampled(layouts, 2)) {
    SCOPED_TRACE(layout.name);
    train(config_of(layout, layout.name, {length}), layout.ranks);
    expect_same_run(layout.name, "one");
    EXPECT_NEAR(result_.validation_loss.value(), validation, kLossTolerance * validation);
  }
}

// A run goes on in another layout, from its checkpoints.
TEST_F(TrainerContextTest, GoesOnInAnotherLayout) {
  train(config_of({.name = "one"}, "whole"), 1);
  train_in_parts({{.name = "cp2_zero3_2", .ranks = 4, .keys = sharded(3, 2), .cp = 2},
                  {.name = "cp2_tp2", .ranks = 4, .tp = 2, .cp = 2},
                  {.name = "one"}},
                 "parts");
  expect_same_losses(losses("parts"), losses("whole"));
}

TEST_F(TrainerContextTest, TheWholeModelIsThatOfOneRank) {
  const Layout layout{.name = "cp2", .ranks = 2, .cp = 2};
  double expected = 0;
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    Trainer trainer(config_of({.name = "one"}, "one"), {.world = world, .quiet = true});
    trainer.run();
    const at::Tensor tokens = at::arange(32, at::TensorOptions(at::kLong)).view({1, 32});
    const at::NoGradGuard no_grad;
    expected = trainer.model().loss(tokens, tokens).item<double>();
  });
  run_local_ranks(layout.ranks, [&](const std::shared_ptr<Communicator>& world) {
    Trainer trainer(config_of(layout, layout.name), {.world = world, .quiet = true});
    trainer.run();
    EXPECT_TRUE(trainer.model_is_only_for_training());  // its own model has some positions of a sequence only
    const at::Tensor tokens = at::arange(32, at::TensorOptions(at::kLong)).view({1, 32});
    const at::NoGradGuard no_grad;
    EXPECT_THAT(error_text<Error>([&] { trainer.model().loss(tokens, tokens); }),
                HasSubstr("a mean loss needs whole sequences, but they are cut over 2 ranks"));
    EXPECT_THAT(error_text<Error>([&] { trainer.model().log_likelihoods(tokens, tokens); }),
                HasSubstr("a likelihood needs whole sequences"));
    EXPECT_THAT(error_text<Error>([&] {
                  nn::KvCache cache = trainer.model().make_cache(1, 40);
                  trainer.model().forward(tokens, cache);
                }),
                HasSubstr("a cache needs whole sequences"));
    if (const auto whole = trainer.full_model()) {
      EXPECT_NEAR(whole->loss(tokens, tokens).item<double>(), expected, kLossTolerance * expected);
    }
  });
}

TEST_F(TrainerContextTest, WhatItCannotDoIsRefusedBeforeAnythingIsRead) {
  EXPECT_THAT(refusal<ConfigError>(config_of({.name = "cp2", .ranks = 2, .cp = 2}, "bad"), 3),
              HasSubstr("context_parallel_degree 2 does not divide the 3 ranks; degrees that do: 1, 3"));
  EXPECT_THAT(refusal<ConfigError>(config_of({.name = "cp8", .ranks = 8, .keys = {kHeads}, .cp = 8}, "bad"), 8),
              HasSubstr("context_parallel_degree 8 does not divide the 4 heads"));
}

}  // namespace
}  // namespace phalanx::train::trainer_context_test
