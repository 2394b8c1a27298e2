#include "phalanx/config/layouts.h"

#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::config {
namespace {

TrainConfig small_config(std::int64_t global_batch = -1) {
  TrainConfig config;
  config.training.local_batch_size = 3;
  config.training.global_batch_size = global_batch;
  config.training.seq_len = 32;
  return config;
}

std::string layout_refusal(const std::string& name, std::int64_t ranks = 8) {
  return error_text<ConfigError>([&] { with_layout(small_config(), name, ranks); });
}

TEST(Layouts, AreReadFromTheirNames) {
  const NamedLayout layout = with_layout(small_config(), "dp_replicate=2,dp_shard=2,zero=1,tp=2,sp=off,ac=op", 8);
  EXPECT_EQ(layout.ranks, 8);
  EXPECT_EQ(plan_run(layout.config, 8).parallel.text(), "dp_replicate=2 x dp_shard=2 (ZeRO-1) x tp=2");
  EXPECT_EQ(layout.config.activation_checkpoint.mode, "selective");
  EXPECT_EQ(with_layout(small_config(), "", 8).name, "one rank");
  const NamedLayout other = with_layout(small_config(), "ac=3,precision=float16", 8);
  EXPECT_EQ(other.config.activation_checkpoint.mode, "selective");
  EXPECT_EQ(other.config.activation_checkpoint.selective_ac_option, "3");
  EXPECT_EQ(other.config.training.mixed_precision_param, "float16");
  for (const char* other_name : {"precision=bf16", "precision=torch.bfloat16"}) {
    EXPECT_EQ(with_layout(small_config(), other_name, 1).config.training.mixed_precision_param, "bfloat16");
  }
}

TEST(Layouts, OfContextParallelismAreReadFromTheirNames) {
  const auto parallel = [](const std::string& name) {
    const NamedLayout layout = with_layout(small_config(24), name, 8);
    return plan_run(layout.config, layout.ranks).parallel;
  };
  EXPECT_EQ(parallel("dp_replicate=2,cp=4").text(), "dp_replicate=2 x cp=4");
  EXPECT_FALSE(parallel("cp=4").is_sharded());
  EXPECT_EQ(parallel("cp=4,zero=2").text(), "dp_shard=1 (ZeRO-2 over dp_shard x cp) x cp=4");
  EXPECT_EQ(parallel("dp_shard=2,cp=2,tp=2,zero=3").shards(), 4);
  EXPECT_EQ(with_layout(small_config(), "cp=2,exchange=heads", 8).config.parallelism.context_parallel_exchange,
            "heads");
  EXPECT_EQ(with_layout(small_config(), "cp=2,balance=headtail", 8).config.parallelism.context_parallel_load_balancer,
            "headtail");
  EXPECT_EQ(with_layout(small_config(), "cp=2", 8).config.parallelism.context_parallel_load_balancer, "auto");
  EXPECT_THAT(layout_refusal("cp=2,balance=work"),
              HasSubstr("balance is 'work': expected one of auto, headtail, ptrr"));
  EXPECT_THAT(layout_refusal("cp=2,balance=ptrr"), HasSubstr("deals out blocks of packed sequences"));
  EXPECT_THAT(layout_refusal("cp=2,exchange=rows"),
              HasSubstr("exchange is 'rows': expected one of keys, heads, ring, auto"));
  EXPECT_THAT(layout_refusal("cp=8,exchange=heads"),
              HasSubstr("context_parallel_degree 8 does not divide the 4 heads"));
}

TEST(Layouts, ShareTheGlobalBatch) {
  for (const char* name : {"", "dp_shard=2", "dp_replicate=4", "tp=2", "dp_replicate=8"}) {
    const NamedLayout layout = with_layout(small_config(), name, 8);
    EXPECT_EQ(plan_run(layout.config, layout.ranks).global_batch_size, 24) << name;
  }
  EXPECT_EQ(with_layout(small_config(16), "dp_shard=2", 8).config.training.local_batch_size, 2);
}

TEST(Layouts, MayNameTheBatchOfAPass) {
  const NamedLayout layout = with_layout(small_config(16), "dp_shard=2,batch=4", 8);
  EXPECT_EQ(layout.config.training.local_batch_size, 4);
  EXPECT_EQ(plan_run(layout.config, 2).accumulation_steps, 2);
  const NamedLayout pipeline = with_layout(small_config(16), "pp=2,batch=4", 8);
  EXPECT_EQ(plan_run(pipeline.config, 2).micro_batches, 4);
  EXPECT_THAT(layout_refusal("dp_shard=2,batch=5"), HasSubstr("global_batch_size 24 is not a multiple of"));
}

TEST(Layouts, WhatIsNoLayoutIsRefused) {
  EXPECT_THAT(layout_refusal("dp_shards=2"), HasSubstr("'dp_shards=2' is not known (did you mean 'dp_shard'?): exp"));
  EXPECT_THAT(layout_refusal("tp"), HasSubstr("expected parts like tp=2"));
  EXPECT_THAT(layout_refusal("tp=two"), HasSubstr("tp is 'two': expected a number, 1 or more"));
  EXPECT_THAT(layout_refusal("tp=2,tp=2"), HasSubstr("tp is there twice"));
  EXPECT_THAT(layout_refusal("zero=4"), HasSubstr("zero is 4: expected 1, 2 or 3"));
  EXPECT_THAT(layout_refusal("ac=some"), HasSubstr("ac is 'some': expected one of none, full, op, or a number"));
  EXPECT_THAT(layout_refusal("precision=int8"), HasSubstr("precision is 'int8': expected one of float32, bfloat16"));
  EXPECT_THAT(layout_refusal("dp_shard=4,tp=4"), HasSubstr("takes 16 ranks, but there are 8"));
  EXPECT_THAT(layout_refusal("tp=3"), HasSubstr("tensor_parallel_degree = 3 does not fit the model"));
}

TEST(Layouts, AllOfThemAreThoseThatDivide) {
  const std::vector<std::string> mixes = {"one rank",
                                          "dp_replicate=2",
                                          "dp_shard=2,zero=1",
                                          "dp_shard=2,zero=2",
                                          "dp_shard=2,zero=3",
                                          "tp=2",
                                          "dp_replicate=4",
                                          "dp_replicate=2,dp_shard=2,zero=1",
                                          "dp_replicate=2,dp_shard=2,zero=2",
                                          "dp_replicate=2,dp_shard=2,zero=3",
                                          "dp_shard=4,zero=1",
                                          "dp_shard=4,zero=2",
                                          "dp_shard=4,zero=3",
                                          "pp=2",
                                          "pp=4",
                                          "pp=2,dp_replicate=2",
                                          "pp=2,tp=2",
                                          "dp_replicate=2,tp=2",
                                          "dp_shard=2,tp=2,zero=1",
                                          "dp_shard=2,tp=2,zero=2",
                                          "dp_shard=2,tp=2,zero=3",
                                          "tp=4",
                                          "pp=2,dp_shard=2,zero=1",
                                          "pp=2,dp_shard=2,zero=2",
                                          "pp=2,dp_shard=2,zero=3",
                                          "pp=2,dp_shard=2,zero=3,reshard=always",
                                          "cp=2",
                                          "cp=2,exchange=heads",
                                          "cp=2,exchange=ring",
                                          "cp=2,zero=3",
                                          "cp=4",
                                          "cp=4,exchange=heads",
                                          "cp=4,exchange=ring",
                                          "cp=4,zero=3",
                                          "cp=2,tp=2",
                                          "cp=2,tp=2,exchange=heads",
                                          "cp=2,tp=2,exchange=ring",
                                          "pp=2,cp=2",
                                          "dp_replicate=2,cp=2",
                                          "dp_replicate=2,cp=2,zero=3",
                                          "dp_shard=2,cp=2,zero=1",
                                          "dp_shard=2,cp=2,zero=2",
                                          "dp_shard=2,cp=2,zero=3"};
  std::vector<std::string> expected = mixes;
  for (const std::string& mix : mixes) {
    if (mix.find('4') != std::string::npos || mix == "one rank" || mix.find("reshard") != std::string::npos) continue;
    expected.push_back(mix + ",precision=bfloat16,ac=full");
    expected.push_back(mix + ",precision=float16,ac=op");
  }
  for (const std::string how : {"ac=full", "ac=2", "ac=op"}) {
    expected.push_back(how);
    expected.push_back("precision=bfloat16," + how);
    expected.push_back("precision=float16," + how);
  }
  expected.emplace_back("pp=2,cp=2,exchange=ring");
  expected.emplace_back("dp_shard=2,cp=2,zero=3,exchange=ring");
  expected.emplace_back("precision=bfloat16");
  expected.emplace_back("precision=float16");
  std::vector<std::string> names;
  for (const NamedLayout& layout : all_layouts(small_config(), 4)) names.push_back(layout.name);
  EXPECT_THAT(names, ::testing::UnorderedElementsAreArray(expected));
  EXPECT_EQ(names[0], "one rank");
  // A batch of 2 cannot be shared by 4.
  for (const NamedLayout& layout : all_layouts(small_config(2), 4)) {
    EXPECT_LE(plan_run(layout.config, layout.ranks).parallel.data_parallel_size(), 2) << layout.name;
  }
}

// What no single rank computes has nothing to be compared with.
TEST(Layouts, AllOfThemHaveTheSameRunOnOneRank) {
  TrainConfig config = small_config(8);
  config.model.name = "mixtral";
  config.model.flavor = "debug";
  config.training.local_batch_size = 2;
  config.training.moe_aux_loss_coeff = 0.01;
  const auto names = [&] {
    std::vector<std::string> all;
    for (const NamedLayout& layout : all_layouts(config, 4)) all.push_back(layout.name);
    return all;
  };
  EXPECT_THAT(names(), AllOf(Contains("dp_replicate=2"), Contains("dp_replicate=4"), Contains("pp=2,dp_replicate=2")));
  // The experts of shards and of ranks of context parallelism together.
  EXPECT_THAT(names(), AllOf(Contains("cp=2,zero=3,ep=2"), Contains("dp_shard=2,cp=2,zero=3,ep=4"),
                             Contains("dp_shard=2,cp=2,zero=1,ep=2")));
  config.training.moe_aux_loss_unit = "global_batch";
  // Two ranks have two passes of two sequences each; four have one.
  EXPECT_THAT(names(), AllOf(Not(Contains("dp_replicate=2")), Contains("dp_replicate=4"), Contains("pp=2"),
                             Not(Contains("pp=2,dp_replicate=2"))));
  std::vector<LeftOutLayout> left_out;
  all_layouts(config, 4, &left_out);
  const auto found = std::ranges::find(left_out, "dp_replicate=2", &LeftOutLayout::name);
  ASSERT_NE(found, left_out.end());
  EXPECT_THAT(found->reason, HasSubstr("global_batch"));
}

}  // namespace
}  // namespace phalanx::config
