// Training with cut matrices and in pipeline stages gives the run of one rank.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/model_config.h"
#include "phalanx/observe/trace_file.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/timeline.h"
#include "phalanx/train/model/layer_costs.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

class TrainerTensorTest : public TrainerTest {
 protected:
  void expect_same_run(const std::string& run, const std::string& other) const {
    SCOPED_TRACE(run);
    expect_same_losses(losses(run), losses(other));
  }
};

TEST_F(TrainerTensorTest, TrainsAsOneRankDoes) {
  train(config_of({.name = "one"}, "one"), 1);
  const double validation = result_.validation_loss.value();
  const std::vector<Layout> layouts = {
      {.name = "tp2", .ranks = 2, .tp = 2},
      {.name = "tp2_whole_tokens", .ranks = 2, .tp = 2, .keys = {"--parallelism.no-enable_sequence_parallel"}},
      {.name = "tp4", .ranks = 4, .tp = 4},
      {.name = "ddp2_tp2", .ranks = 4, .tp = 2},
      {.name = "zero3_tp2", .ranks = 4, .tp = 2, .keys = sharded(3, 2)},
      {.name = "zero3_tp2_recomputed",
       .ranks = 4,
       .tp = 2,
       .keys = {"--parallelism.data_parallel_shard_degree=2", "--activation_checkpoint.mode=full"}},
      {.name = "pp2", .ranks = 2, .pp = 2},
      {.name = "pp2_zbv", .ranks = 2, .pp = 2, .keys = {"--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"}},
      {.name = "pp2_measured", .ranks = 2, .pp = 2, .keys = {"--parallelism.pipeline_parallel_balance=measured"}},
      {.name = "pp2_ddp2", .ranks = 4, .pp = 2, .keys = {"--activation_checkpoint.mode=full"}},
      {.name = "pp2_tp2", .ranks = 4, .tp = 2, .pp = 2},
      {.name = "pp2_zero3_2", .ranks = 4, .pp = 2, .keys = sharded(3, 2)},
      {.name = "pp2_zero1_2_zbv",
       .ranks = 4,
       .pp = 2,
       .keys = {"--parallelism.data_parallel_shard_degree=2", "--parallelism.zero_stage=1",
                "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"}},
      {.name = "pp2_zero3_2_tp2_recomputed",
       .ranks = 8,
       .tp = 2,
       .pp = 2,
       .keys = {"--parallelism.data_parallel_shard_degree=2", "--parallelism.fsdp_reshard_after_forward=always",
                "--activation_checkpoint.mode=full"}},
      {.name = "tp2_tied", .ranks = 2, .tp = 2, .keys = {"--model.tie_embeddings"}},
      {.name = "pp2_tied", .ranks = 2, .pp = 2, .keys = {"--model.tie_embeddings"}},
      {.name = "pp2_zero3_2_recomputed_tied",
       .ranks = 4,
       .pp = 2,
       .keys = {"--model.tie_embeddings", "--parallelism.data_parallel_shard_degree=2",
                "--parallelism.fsdp_reshard_after_forward=always", "--activation_checkpoint.mode=full"}},
      {.name = "pp2_zero3_2_zbv_tied",
       .ranks = 4,
       .pp = 2,
       .keys = {"--model.tie_embeddings", "--parallelism.data_parallel_shard_degree=2",
                "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"}}};
  train(config_of({.name = "tied", .keys = {"--model.tie_embeddings"}}, "tied"), 1);
  const double validation_tied = result_.validation_loss.value();
  for (const Layout& layout : sampled(layouts, 6)) {
    SCOPED_TRACE(layout.name);
    train(config_of(layout, layout.name), layout.ranks);
    const bool tied = layout.name.ends_with("tied");
    expect_same_run(layout.name, tied ? "tied" : "one");
    EXPECT_NEAR(result_.validation_loss.value(), tied ? validation_tied : validation, kLossTolerance * validation);
    const std::vector<double> norms = values_of(layout.name, "grad_norm"),
                              one = values_of(tied ? "tied" : "one", "grad_norm");
    ASSERT_EQ(norms.size(), one.size());
    for (std::size_t i = 0; i < norms.size(); ++i) EXPECT_NEAR(norms[i], one[i], 1e-3 * one[i]) << i;
  }
}

TEST_F(TrainerTensorTest, TiedEmbeddingsGoOnInAnotherLayout) {
  const std::vector<std::string> tied = {"--model.tie_embeddings"};
  train(config_of({.name = "one", .keys = tied}, "whole"), 1);
  const std::vector<Layout> layouts = {
      {.name = "pp2", .ranks = 2, .pp = 2, .keys = tied},
      {.name = "pp2_zero3_2",
       .ranks = 4,
       .pp = 2,
       .keys = {"--model.tie_embeddings", "--parallelism.data_parallel_shard_degree=2"}},
      {.name = "one", .keys = tied}};
  train_in_parts(layouts, "parts");
  expect_same_run("parts", "whole");
}

TEST_F(TrainerTensorTest, LayersAreMeasuredOnceForAllRanks) {
  const config::TrainConfig plain = config_of({.name = "pp2", .ranks = 2, .pp = 2}, "pp2");
  const config::TrainConfig recomputing =
      config_of({.name = "pp2", .ranks = 2, .pp = 2}, "pp2",
                {"--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"});
  const models::LlamaConfig model = config::model_config(plain);
  std::vector<std::vector<double>> plain_costs(2), recomputing_costs(2);
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    const auto rank = static_cast<std::size_t>(world->rank());
    plain_costs[rank] = measure_layer_costs(plain, model, 2, at::kCPU, *world);
    recomputing_costs[rank] = measure_layer_costs(recomputing, model, 2, at::kCPU, *world);
  });
  EXPECT_EQ(plain_costs[0], plain_costs[1]);
  const std::vector<double>& costs = plain_costs[0];
  ASSERT_EQ(costs.size(), static_cast<std::size_t>(2 * model.n_layers + 1));
  for (std::size_t i = 0; i < costs.size(); ++i) {
    EXPECT_GT(costs[i], 0.0);
    if (i >= 2 && i + 1 < costs.size()) {
      EXPECT_EQ(costs[i], costs[i - 2]);  // built alike
    }
  }
  EXPECT_NE(recomputing_costs[0][0], recomputing_costs[0][2]);  // every second one is not recomputed
  EXPECT_EQ(recomputing_costs[0], recomputing_costs[1]);
}

TEST_F(TrainerTensorTest, ATraceHoldsEveryPassOfAPipeline) {
  train(config_of({.name = "pp2_zbv", .ranks = 2, .pp = 2, .keys = {"--parallelism.pipeline_parallel_schedule=ZBV"}},
                  "traced", {"--training.steps=3", "--profiling.enable_profiling", "--profiling.profile_freq=3"}),
        2);
  std::vector<std::vector<schedule::ExecutedPass>> ranks;
  const auto files = observe::read_trace_files(path("traced") + "/profile_traces/iteration_3");
  for (const auto& file : files) {
    const double offset = file.epoch_seconds - files[0].epoch_seconds;
    ranks.emplace_back();
    const auto all = std::ranges::find(file.spans, "pipeline", &observe::TraceFileSpan::name);
    ASSERT_NE(all, file.spans.end());
    for (const auto& span : file.spans) {
      if (span.category != "pass") continue;
      EXPECT_GE(span.begin_seconds, all->begin_seconds);  // inside the pipeline's span, and none in another
      EXPECT_LE(span.end_seconds, all->end_seconds);
      if (!ranks.back().empty()) {
        EXPECT_GE(offset + span.begin_seconds + 1e-6, ranks.back().back().end);
      }
      ranks.back().push_back(
          {schedule::parse_action(span.name), offset + span.begin_seconds, offset + span.end_seconds});
    }
  }
  const auto plan = schedule::schedule_of(ranks);
  EXPECT_EQ(plan.name, "ZBVZeroBubble");
  EXPECT_EQ(plan.micro_batches, 8);
  const auto timeline = schedule::make_timeline(plan, ranks);
  EXPECT_GT(timeline.executed.makespan, 0.0);
  EXPECT_GE(timeline.earliest_use, -1e-4);  // all on one clock
}

TEST_F(TrainerTensorTest, TheWholeModelIsThatOfOneRank) {
  train(config_of({.name = "one"}, "one"), 1);
  for (const Layout& layout : {Layout{.name = "zero3_tp2", .ranks = 4, .tp = 2, .keys = sharded(3, 2)},
                               Layout{.name = "pp2", .ranks = 2, .pp = 2}}) {
    double loss = 0;
    run_local_ranks(layout.ranks, [&](const std::shared_ptr<Communicator>& world) {
      Trainer trainer(config_of(layout, layout.name), {.world = world, .quiet = true});
      trainer.run();
      const auto whole = trainer.full_model();
      EXPECT_EQ(whole != nullptr, world->rank() == 0);
      if (!whole) return;
      EXPECT_EQ(whole->tok_embeddings->weight.size(0), whole->config().vocab_size);
      const at::Tensor tokens = at::arange(32, at::TensorOptions(at::kLong)).view({1, 32});
      const at::NoGradGuard no_grad;
      loss = whole->loss(tokens, tokens).item<double>();
    });
    double expected = 0;
    run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
      Trainer trainer(config_of({.name = "one"}, "one"), {.world = world, .quiet = true});
      const at::Tensor tokens = at::arange(32, at::TensorOptions(at::kLong)).view({1, 32});
      const at::NoGradGuard no_grad;
      expected = trainer.model().loss(tokens, tokens).item<double>();
    });
    EXPECT_NEAR(loss, expected, 1e-4 * expected) << layout.name;
  }
}

TEST_F(TrainerTensorTest, WhatDoesNotDivideIsRefusedBeforeAnythingIsRead) {
  EXPECT_THAT(
      refusal<ConfigError>(config_of({.name = "tp4", .ranks = 4, .tp = 4}, "bad", {"--training.seq_len=30"}), 4),
      HasSubstr("seq_len 30 / 4 leaves 2"));
  EXPECT_THAT(refusal<ConfigError>(config_of({.name = "tp2", .ranks = 2, .tp = 2}, "bad"), 3),
              HasSubstr("tensor_parallel_degree 2 does not divide the 3 ranks; degrees that do: 1, 3"));
}

}  // namespace
}  // namespace phalanx::train
