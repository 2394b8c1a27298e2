#include "phalanx/layout/parallel_plan.h"

#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

constexpr ModelDimensions kModel{
    .n_layers = 4, .n_heads = 8, .n_kv_heads = 2, .ffn_hidden = 688, .vocab_size = 4096, .seq_len = 256};

std::string refusal(const ParallelPlan& plan, ModelDimensions model, std::int64_t ranks) {
  return error_text<ConfigError>([&] { check(plan, model, ranks, {.tp = "[parallelism] tensor_parallel_degree"}); });
}

TEST(ParallelPlan, AxesAreThoseOfMoreThanOneRank) {
  EXPECT_EQ(ParallelPlan{}.axes(), (std::vector<MeshAxis>{{"dp_shard", 1}}));
  const ParallelPlan all{.pp = 2, .dp_replicate = 3, .dp_shard = 4, .tp = 5};
  EXPECT_EQ(all.axes(), (std::vector<MeshAxis>{{"pp", 2}, {"dp_replicate", 3}, {"dp_shard", 4}, {"tp", 5}}));
  EXPECT_EQ(all.ranks(), 120);
  EXPECT_EQ(all.text(), "pp=2 x dp_replicate=3 x dp_shard=4 (ZeRO-3) x tp=5 (sequence parallel)");
  EXPECT_EQ(ParallelPlan{}.text(), "1 rank");
}

TEST(ParallelPlan, RanksOfOneTensorGroupOrStageHaveOneBatch) {
  const ParallelPlan plan{.pp = 2, .dp_replicate = 2, .dp_shard = 2, .tp = 2};
  const MeshShape mesh(plan.axes());
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const auto place = mesh.coordinates_of(rank);
    EXPECT_EQ(plan.data_parallel_rank(rank), place[1] * 2 + place[2]) << rank;
  }
  EXPECT_EQ(plan.data_parallel_size(), 4);
}

TEST(ParallelPlan, RanksOfOneContextGroupHaveOneBatchAndShareTheSumOfGradients) {
  ParallelPlan plan{.pp = 2, .dp_replicate = 2, .dp_shard = 3, .cp = 4, .tp = 5};
  EXPECT_EQ(plan.ranks(), 240);
  EXPECT_EQ(plan.axes(), (std::vector<MeshAxis>{{"pp", 2}, {"dp_replicate", 2}, {"dp_shard_cp", 12}, {"tp", 5}}));
  EXPECT_EQ(plan.data_parallel_size(), 6);
  EXPECT_EQ(plan.loss_parts(), 24);
  const MeshShape mesh(plan.axes());
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const auto place = mesh.coordinates_of(rank);
    EXPECT_EQ(plan.data_parallel_rank(rank), place[1] * 3 + place[2] / 4) << rank;
    EXPECT_EQ(plan.context_parallel_rank(rank), place[2] % 4) << rank;
  }
  EXPECT_EQ(plan.text(),
            "pp=2 x dp_replicate=2 x dp_shard=3 (ZeRO-3 over dp_shard x cp) x cp=4 x tp=5 (sequence parallel)");
}

TEST(ParallelPlan, ContextParallelRanksShardTheModelIfToldTo) {
  const ParallelPlan copies{.dp_replicate = 3, .cp = 2};
  EXPECT_FALSE(copies.is_sharded());
  EXPECT_EQ(copies.axes(), (std::vector<MeshAxis>{{"dp_replicate_cp", 6}}));
  EXPECT_EQ(copies.replicas(), 6);
  EXPECT_EQ(copies.shards(), 1);
  const ParallelPlan shards{.dp_replicate = 3, .cp = 2, .shards_over_cp = true};
  EXPECT_TRUE(shards.is_sharded());
  EXPECT_EQ(shards.axes(), (std::vector<MeshAxis>{{"dp_replicate", 3}, {"dp_shard_cp", 2}}));
  EXPECT_EQ(shards.replicas(), 3);
  EXPECT_EQ(shards.shards(), 2);
  EXPECT_FALSE((ParallelPlan{.dp_replicate = 3, .shards_over_cp = true}.is_sharded()));
}

TEST(ParallelPlan, DegreesMakeTheRanks) {
  EXPECT_EQ(refusal({.dp_shard = 2, .tp = 2}, kModel, 4), "");
  EXPECT_THAT(refusal({.dp_shard = 2, .tp = 2}, kModel, 6),
              HasSubstr("dp_shard 2 x cp 1 x tp 2 = 4 ranks, but there are 6"));
  EXPECT_THAT(refusal({.tp = 0}, kModel, 1), HasSubstr("tensor_parallel_degree is 0: expected 1 or more"));
}

TEST(ParallelPlan, TensorParallelismDividesTheModel) {
  for (const std::int64_t tp : {1, 2, 4, 8}) EXPECT_EQ(refusal({.tp = tp}, kModel, tp), "") << tp;
  EXPECT_THAT(refusal({.tp = 3}, kModel, 3),
              AllOf(HasSubstr("tensor_parallel_degree = 3 does not fit the model: n_heads 8 / 3 leaves 2, ffn_hidden "
                              "688 / 3 leaves 1, vocab_size 4096 / 3 leaves 1, of n_kv_heads 2 and 3 neither divides "
                              "the other, seq_len 256 / 3 leaves 1"),
                    HasSubstr("degrees that do: 1, 2, 4, 8"), Not(HasSubstr("switch"))));
  ModelDimensions model = kModel;
  model.n_kv_heads = 6;
  model.n_heads = 12;
  model.vocab_size = 4096;
  EXPECT_THAT(refusal({.tp = 4}, model, 4), HasSubstr("model: of n_kv_heads 6 and 4 neither divides the other; deg"));
  model = kModel;
  model.seq_len = 250;
  EXPECT_THAT(refusal({.tp = 4}, model, 4), HasSubstr("seq_len 250 / 4 leaves 2; degrees that do: 1, 2; or switch"));
  EXPECT_EQ(refusal({.tp = 4, .sequence_parallel = false}, model, 4), "");
}

TEST(ParallelPlan, ExpertsAreDividedAmongRanksThatShard) {
  ModelDimensions model = kModel;
  EXPECT_THAT(refusal({.dp_shard = 4, .ep = 2}, model, 4), HasSubstr("ep = 2, but the model has no experts"));
  model.experts = 6;
  for (const std::int64_t ep : {1, 2}) EXPECT_EQ(refusal({.dp_shard = 4, .ep = ep}, model, 4), "") << ep;
  EXPECT_THAT(
      refusal({.dp_shard = 4, .ep = 4}, model, 4),
      HasSubstr("does not divide both the number of ranks that shard the model, 4, and the 6 experts of a layer; "
                "degrees that do: 1, 2"));
  EXPECT_THAT(refusal({.dp_replicate = 4, .ep = 2}, model, 4), HasSubstr("shard the model, 1, and"));
  EXPECT_THAT(refusal({.dp_shard = 2, .ep = 0}, model, 2), HasSubstr("ep is 0: expected 1 or more"));
  const ParallelPlan plan{.dp_shard = 4, .ep = 2};
  EXPECT_EQ(plan.ranks(), 4);
  EXPECT_EQ(plan.text(), "dp_shard=4 (ZeRO-3) x ep=2");
}

TEST(ParallelPlan, AStageHasALayer) {
  EXPECT_EQ(refusal({.pp = 4}, kModel, 4), "");
  EXPECT_THAT(refusal({.pp = 5}, kModel, 5), HasSubstr("pp = 5 stages, but the model has 4 layers"));
}

}  // namespace
}  // namespace phalanx
