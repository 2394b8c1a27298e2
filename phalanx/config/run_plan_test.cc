#include "phalanx/config/run_plan.h"

#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/context_parallel.h"

namespace phalanx::config {
namespace {

TrainConfig config_of(const std::string& text) { return parse_config(text, "run.toml", {}); }

std::string plan_refusal(const TrainConfig& config, std::int64_t ranks) {
  return error_text<ConfigError>([&] { plan_run(config, ranks); });
}

TEST(RunPlan, AccumulatesUpToTheGlobalBatch) {
  TrainConfig config = config_of("[training]\nlocal_batch_size = 4\nglobal_batch_size = 24\n");
  EXPECT_EQ(plan_run(config, 2).accumulation_steps, 3);
  config.training.global_batch_size = -1;
  EXPECT_EQ(plan_run(config, 3).global_batch_size, 12);
  EXPECT_EQ(plan_run(config, 3).accumulation_steps, 1);
}

TEST(RunPlan, IndivisibleBatchGivesEquationAndChoices) {
  const TrainConfig config = config_of("[training]\nlocal_batch_size = 4\nglobal_batch_size = 18\n");
  EXPECT_THAT(plan_refusal(config, 2),
              AllOf(HasSubstr("global_batch_size 18 is not a multiple of local_batch_size 4 x 2 ranks = 8"),
                    HasSubstr("global_batch_size 16 or 24"), HasSubstr("local_batch_size 3")));
  TrainConfig degree = config;
  degree.parallelism.data_parallel_replicate_degree = 4;
  EXPECT_THROW(plan_run(degree, 2), ConfigError);
  degree.training.global_batch_size = -1;
  EXPECT_THROW(plan_run(degree, 2), ConfigError);
  EXPECT_EQ(plan_run(degree, 4).global_batch_size, 16);
}

TEST(RunPlan, DegreesMakeTheRanks) {
  const auto degrees = [](std::int64_t replicate, std::int64_t shard, std::int64_t ranks, std::int64_t tp = 1) {
    TrainConfig config;
    config.parallelism.data_parallel_replicate_degree = replicate;
    config.parallelism.data_parallel_shard_degree = shard;
    config.parallelism.tensor_parallel_degree = tp;
    const RunPlan plan = plan_run(config, ranks);
    return std::pair(plan.parallel.dp_replicate, plan.parallel.dp_shard);
  };
  EXPECT_EQ(degrees(-1, 1, 4), std::pair(4L, 1L));
  EXPECT_EQ(degrees(-1, -1, 4), std::pair(1L, 4L));
  EXPECT_EQ(degrees(1, -1, 4), std::pair(1L, 4L));
  EXPECT_EQ(degrees(-1, 2, 8), std::pair(4L, 2L));
  EXPECT_EQ(degrees(2, -1, 8), std::pair(2L, 4L));
  EXPECT_EQ(degrees(-1, 1, 8, 2), std::pair(4L, 1L));
  EXPECT_EQ(degrees(2, -1, 8, 2), std::pair(2L, 2L));
  EXPECT_THROW(degrees(2, 2, 8), ConfigError);
  EXPECT_THROW(degrees(-1, 3, 8), ConfigError);
  EXPECT_THROW(degrees(3, -1, 8), ConfigError);
  EXPECT_THROW(degrees(-1, 16, 8), ConfigError);
  EXPECT_THROW(degrees(4, 1, 8, 4), ConfigError);
}

TEST(RunPlan, TensorParallelRanksShareABatch) {
  const TrainConfig config = config_of(
      "[training]\nlocal_batch_size = 4\nglobal_batch_size = 24\n[parallelism]\n"
      "tensor_parallel_degree = 2\ndata_parallel_shard_degree = 3\n");
  const RunPlan plan = plan_run(config, 6);
  EXPECT_EQ(plan.accumulation_steps, 2);
  EXPECT_EQ(plan.parallel.text(), "dp_shard=3 (ZeRO-3) x tp=2 (sequence parallel)");
}

TEST(RunPlan, WhatTheModelCannotBeCutIntoIsRefused) {
  TrainConfig config = config_of("[parallelism]\ntensor_parallel_degree = 3\n");
  EXPECT_THAT(plan_refusal(config, 4),
              HasSubstr("tensor_parallel_degree 3 does not divide the 4 ranks; degrees that do: 1, 2, 4"));
  EXPECT_THAT(
      plan_refusal(config, 3),
      AllOf(HasSubstr("[parallelism] tensor_parallel_degree = 3 does not fit the model: n_heads 4 / 3 leaves 1"),
            HasSubstr("degrees that do: 1, 2, 4")));
  config = config_of("[training]\nseq_len = 250\n[parallelism]\ntensor_parallel_degree = 4\n");
  EXPECT_THAT(plan_refusal(config, 4), HasSubstr("seq_len 250 / 4 leaves 2; degrees that do: 1, 2; or switch "
                                                 "enable_sequence_parallel off"));
  config.parallelism.enable_sequence_parallel = false;
  EXPECT_EQ(plan_run(config, 4).parallel.tp, 4);
}

TEST(RunPlan, APipelineTakesAStepAtOnce) {
  TrainConfig config = config_of(
      "[training]\nlocal_batch_size = 2\nglobal_batch_size = 16\n[parallelism]\npipeline_parallel_degree = 2\n"
      "tensor_parallel_degree = 2\npipeline_parallel_microbatch_size = 2\n");
  const RunPlan plan = plan_run(config, 8);
  EXPECT_EQ(plan.parallel.text(), "pp=2 x dp_replicate=2 x tp=2 (sequence parallel)");
  EXPECT_EQ(plan.micro_batches, 4);
  EXPECT_EQ(plan.local_batch_size * plan.accumulation_steps, 8);
  EXPECT_EQ(plan.accumulation_steps, 1);

  EXPECT_THAT(plan_refusal(config, 10), HasSubstr("pipeline_parallel_degree 2 does not divide the 5 ranks that tensor "
                                                  "parallelism leaves; degrees that do: 1, 5"));
  config.parallelism.pipeline_parallel_microbatch_size = 3;
  EXPECT_THAT(plan_refusal(config, 8),
              HasSubstr("pipeline_parallel_microbatch_size 3 does not divide the 8 sequences of "
                        "a data rank; sizes that do: 1, 2, 4, 8"));
  config.parallelism.pipeline_parallel_microbatch_size = 8;
  EXPECT_THAT(plan_refusal(config, 8), HasSubstr("1F1B"));  // fewer micro-batches than stages
  config.parallelism.pipeline_parallel_microbatch_size = 1;
  config.parallelism.pipeline_parallel_schedule = "2F2B";
  EXPECT_THAT(plan_refusal(config, 8), HasSubstr("1F1B"));
  config.parallelism.pipeline_parallel_schedule = "zbv";
  EXPECT_EQ(plan_run(config, 8).micro_batches, 8);
  config.parallelism.data_parallel_shard_degree = 2;
  EXPECT_EQ(plan_run(config, 8).parallel.text(), "pp=2 x dp_shard=2 (ZeRO-3) x tp=2 (sequence parallel)");
  config.parallelism.data_parallel_shard_degree = 1;
  config.parallelism.tensor_parallel_degree = 1;
  config.parallelism.pipeline_parallel_degree = 5;
  EXPECT_THAT(plan_refusal(config, 5), HasSubstr("pipeline_parallel_degree = 5 stages, but the model has 4 layers"));
}

TEST(RunPlan, ShardingIsForSeveralRanks) {
  const std::string shards = "[parallelism]\ndata_parallel_shard_degree = -1\n";
  const TrainConfig grouped = config_of(shards + "fsdp_reshard_after_forward = 2\n");
  EXPECT_EQ(plan_run(grouped, 4).parallel.dp_shard, 4);
  EXPECT_THAT(plan_refusal(grouped, 3), HasSubstr("fsdp_reshard_after_forward = 2 does not divide the 3 ranks"));
  EXPECT_THAT(plan_refusal(config_of(shards + "[training]\nenable_cpu_offload = true\n"), 1),
              HasSubstr("of 1 rank none shares the model"));
}

std::string context_refusal(const std::string& keys, std::int64_t ranks) {
  return error_text<ConfigError>([&] { plan_run(config_of(keys), ranks); });
}

TEST(RunPlan, ContextParallelRanksShareABatch) {
  const RunPlan plan = plan_run(config_of("[training]\nlocal_batch_size = 2\nseq_len = 250\n"
                                          "[parallelism]\ncontext_parallel_degree = 4\ntensor_parallel_degree = 2\n"),
                                24);
  EXPECT_EQ(plan.parallel.text(), "dp_replicate=3 x cp=4 x tp=2 (sequence parallel)");
  EXPECT_EQ(plan.global_batch_size, 6);
  const RunPlan shared = plan_run(
      config_of("[parallelism]\ncontext_parallel_degree = 4\ndata_parallel_shard_degree = -1\nzero_stage = 2\n"), 4);
  EXPECT_EQ(shared.parallel.text(), "dp_shard=1 (ZeRO-2 over dp_shard x cp) x cp=4");
  EXPECT_THAT(context_refusal("[parallelism]\ncontext_parallel_degree = 3\n", 4),
              HasSubstr("context_parallel_degree 3 does not divide the 4 ranks; degrees that do: 1, 2, 4"));
  EXPECT_THAT(context_refusal("[parallelism]\ncontext_parallel_degree = 4\ntensor_parallel_degree = 2\n", 12),
              HasSubstr("context_parallel_degree 4 does not divide the 6 ranks that tensor parallelism leaves"));
  EXPECT_THAT(context_refusal("[parallelism]\ncontext_parallel_degree = 2\npipeline_parallel_degree = 4\n", 4),
              HasSubstr("pipeline_parallel_degree 4 does not divide the 2 ranks that context parallelism leaves"));
}

TEST(RunPlan, SaysWhatAttentionExchanges) {
  const auto exchange = [](const std::string& keys) {
    return plan_run(config_of("[parallelism]\ncontext_parallel_degree = 2\n" + keys), 2).exchange;
  };
  EXPECT_EQ(exchange("").name, "keys");
  EXPECT_EQ(exchange("").reason, "");
  EXPECT_EQ(exchange("context_parallel_exchange = \"ring\"\n").name, "ring");
  EXPECT_EQ(exchange("context_parallel_rotate_method = \"alltoall\"\n").name, "ring");
  const plan::ContextExchangeChoice choice = exchange("context_parallel_exchange = \"auto\"\n");
  EXPECT_THAT(choice.name, AnyOf("keys", "heads", "ring"));
  EXPECT_THAT(choice.reason, HasSubstr("a rank would send in a layer and step: heads "));
}

TEST(RunPlan, SaysHowPackedSequencesAreCut) {
  const auto plan = [](const std::string& parallelism, const std::string& rest) {
    return plan_run(config_of("[parallelism]\ncontext_parallel_degree = 2\n" + parallelism + "[training]\n" + rest), 2);
  };
  const std::string packed = "attn_mask_type = \"block_causal\"\n",
                    headtail = "context_parallel_load_balancer = \"headtail\"\n",
                    by_auto = "context_parallel_exchange = \"auto\"\n";
  EXPECT_TRUE(plan("", packed).cuts_by_work);
  EXPECT_TRUE(plan("", packed).context_cut(1).by_work);
  EXPECT_FALSE(plan("", packed).parallel.context_cut(1).by_work);
  EXPECT_FALSE(plan("", "").cuts_by_work);
  EXPECT_FALSE(plan(headtail, packed).cuts_by_work);
  EXPECT_TRUE(plan("context_parallel_load_balancer = \"ptrr\"\n", packed).cuts_by_work);
  EXPECT_FALSE(plan("context_parallel_exchange = \"ring\"\n", packed).cuts_by_work);
  EXPECT_FALSE(plan("context_parallel_exchange = \"heads\"\n", packed).cuts_by_work);
  EXPECT_THAT(plan(by_auto, packed).exchange.reason,
              HasSubstr("heads and keys give each rank the same work with packed documents"));
  EXPECT_THAT(plan(by_auto + headtail, packed).exchange.reason,
              HasSubstr("heads give each rank the same work with packed documents"));
  EXPECT_EQ(plan(by_auto + "context_parallel_load_balancer = \"ptrr\"\n", packed).exchange.name, "keys");
}

TEST(RunPlan, ACutByWorkThatCannotBeIsRefused) {
  const std::string ptrr = "[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_load_balancer = \"ptrr\"\n",
                    packed = "[training]\nattn_mask_type = \"block_causal\"\n";
  EXPECT_EQ(context_refusal(ptrr + packed, 2), "");
  EXPECT_THAT(context_refusal(ptrr, 2),
              AllOf(HasSubstr("context_parallel_load_balancer = \"ptrr\""), HasSubstr("attn_mask_type is \"causal\""),
                    HasSubstr("set it to \"block_causal\"")));
  EXPECT_THAT(context_refusal(ptrr + "context_parallel_exchange = \"ring\"\n" + packed, 2),
              HasSubstr("but pieces round a ring are exchanged: set context_parallel_exchange = \"keys\""));
  EXPECT_THAT(context_refusal(ptrr + "context_parallel_rotate_method = \"alltoall\"\n" + packed, 2),
              HasSubstr("but pieces round a ring are exchanged"));
  EXPECT_THAT(context_refusal(ptrr + "context_parallel_exchange = \"heads\"\n" + packed, 2),
              HasSubstr("but heads are exchanged"));
  EXPECT_THAT(context_refusal(ptrr + packed + "moe_input_jitter_eps = 0.01\n", 2),
              HasSubstr("does not go with moe_input_jitter_eps = 0.01"));
}

TEST(RunPlan, WhatContextParallelismCannotDoIsRefusedByName) {
  const std::string two = "[parallelism]\ncontext_parallel_degree = 2\n";
  const std::string alltoall = "context_parallel_rotate_method = \"alltoall\"\n";
  EXPECT_EQ(context_refusal(two + alltoall, 2), "");
  EXPECT_THAT(context_refusal(two + alltoall + "context_parallel_exchange = \"heads\"\n", 2),
              HasSubstr("is a ring of keys and values, but context_parallel_exchange = \"heads\" exchanges heads"));
  EXPECT_THAT(context_refusal(two + alltoall + "context_parallel_exchange = \"auto\"\n", 2),
              HasSubstr("but context_parallel_exchange = \"auto\" chooses one: remove one of the two"));
  EXPECT_THAT(context_refusal(two + "context_parallel_rotate_method = \"heads\"\n", 2),
              HasSubstr("expected \"allgather\" or \"alltoall\"; to exchange heads (Ulysses) set context_parallel"));
  EXPECT_EQ(context_refusal("[parallelism]\ncontext_parallel_rotate_method = \"alltoall\"\n", 2), "");
  const std::string heads = "[parallelism]\ncontext_parallel_exchange = \"heads\"\n";
  EXPECT_THAT(context_refusal(heads + "context_parallel_degree = 3\n", 3),
              HasSubstr("context_parallel_degree 3 does not divide the 4 heads: choose"));
  EXPECT_THAT(context_refusal(heads + "context_parallel_degree = 4\ntensor_parallel_degree = 2\n", 8),
              HasSubstr("does not divide the 2 heads (on each of 2 tensor-parallel ranks)"));
  EXPECT_THAT(
      context_refusal("[model]\nn_heads = 6\nn_kv_heads = 3\ndim = 48\n" + heads + "context_parallel_degree = 2\n", 2),
      HasSubstr("of 3 key heads and context_parallel_degree 2 neither divides the other"));
  EXPECT_THAT(
      context_refusal(
          two +
              "[model]\nconverters = [\"quantize.linear.float8\"]\n[training]\nmixed_precision_param = \"bfloat16\"\n",
          2),
      HasSubstr("does not go with float8 layers"));
  EXPECT_THAT(context_refusal(two + "[lora]\nrank = 2\ndropout = 0.1\n", 2),
              HasSubstr("does not go with [lora] dropout"));
  EXPECT_EQ(context_refusal(two + "[lora]\nrank = 2\n", 2), "");
}

}  // namespace
}  // namespace phalanx::config
