#include "phalanx/plan/memory_fit.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/plan/bytes_text.h"
#include "phalanx/schedule/generators.h"

namespace phalanx::plan {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

MemoryLimit limit_of(MemoryLimit::Counts counts, std::int64_t available) {
  return {.name = "RLIMIT_DATA",
          .counts = counts,
          .shared_by = MemoryLimit::SharedBy::process,
          .bytes = static_cast<std::uint64_t>(available + 100 * kMiB),
          .used = static_cast<std::uint64_t>(100 * kMiB),
          .domain = {}};
}

TrainingMemory some_memory() {
  TrainingMemory memory;
  memory.peak[observe::MemoryCategory::parameters] = 400 * kMiB;
  memory.peak[observe::MemoryCategory::activations] = 100 * kMiB;
  memory.peak.shared = 300 * kMiB;
  memory.mapped = 900 * kMiB;
  memory.runtime = 20 * kMiB;
  return memory;
}

TEST(MemoryFit, EachLimitCountsInItsOwnWay) {
  const TrainingMemory memory = some_memory();
  EXPECT_EQ(counted_by(limit_of(MemoryLimit::Counts::private_memory, 0), memory), 220 * kMiB);
  EXPECT_EQ(counted_by(limit_of(MemoryLimit::Counts::everything, 0), memory), 520 * kMiB);
  EXPECT_EQ(counted_by(limit_of(MemoryLimit::Counts::mappings, 0), memory), 1420 * kMiB);
}

TEST(MemoryFit, FindsWhatIsMissingMost) {
  const TrainingMemory memory = some_memory();
  const auto process = limit_of(MemoryLimit::Counts::private_memory, 220 * kMiB);
  EXPECT_FALSE(find_shortage(memory, {{process, 1}}));
  EXPECT_FALSE(find_shortage(memory, {}));
  const auto shortage = find_shortage(memory, {{process, 1},
                                               {limit_of(MemoryLimit::Counts::private_memory, 219 * kMiB), 1},
                                               {limit_of(MemoryLimit::Counts::everything, 2000 * kMiB), 4}});
  ASSERT_TRUE(shortage);
  EXPECT_EQ(shortage->missing, 80 * kMiB);
  EXPECT_EQ(shortage->limit.ranks, 4);
  EXPECT_EQ(shortage->needed, 520 * kMiB);
}

TEST(MemoryFit, ALimitTooLargeForANumberWithASignHolds) {
  MemoryLimit limit = limit_of(MemoryLimit::Counts::everything, 0);
  limit.bytes = ~std::uint64_t{0};
  EXPECT_FALSE(find_shortage(some_memory(), {{limit, 4}}));
}

TEST(MemoryFit, WhatTheFirstRankAloneTakesCountsOnce) {
  TrainingMemory memory = some_memory();
  memory.first_rank_only = 200 * kMiB;  // of its 520
  const auto limit = limit_of(MemoryLimit::Counts::everything, 520 * kMiB + 3 * 320 * kMiB);
  EXPECT_FALSE(find_shortage(memory, {{limit, 4}}));
  EXPECT_FALSE(find_shortage(memory, {{limit_of(MemoryLimit::Counts::everything, 4 * 320 * kMiB), 4, false}}));
  EXPECT_FALSE(find_shortage(memory, {{limit_of(MemoryLimit::Counts::everything, 320 * kMiB), 1, false}}));
  const auto alone = find_shortage(memory, {{limit_of(MemoryLimit::Counts::everything, 519 * kMiB), 1}});
  ASSERT_TRUE(alone);
  EXPECT_EQ(alone->missing, kMiB);
  const auto together = find_shortage(memory, {{limit_of(MemoryLimit::Counts::everything, 1480 * kMiB - kMiB), 4}});
  ASSERT_TRUE(together);
  EXPECT_EQ(together->missing, kMiB);
  EXPECT_THAT(shortage_text(*together, memory),
              StartsWith("needs 320 MiB, rank 0 200 MiB more; there are 1.44 GiB, for 4 ranks: 1.00 MiB are missing"));
}

TEST(MemoryFit, StacksCountWhereMappingsDo) {
  TrainingMemory memory = some_memory();
  memory.thread_stacks = 24 * kMiB;
  EXPECT_EQ(counted_by(limit_of(MemoryLimit::Counts::private_memory, 0), memory), 244 * kMiB);
  EXPECT_EQ(counted_by(limit_of(MemoryLimit::Counts::everything, 0), memory), 520 * kMiB);
  EXPECT_EQ(counted_by(limit_of(MemoryLimit::Counts::mappings, 0), memory), 1444 * kMiB);
  EXPECT_THAT(prediction_text(memory), HasSubstr("; 24.0 MiB of threads' stacks, for RLIMIT_DATA and RLIMIT_AS"));
  EXPECT_THAT(prediction_text(memory), ::testing::Not(HasSubstr("host's memory")));
  memory.on_host = 30 * kMiB;
  EXPECT_THAT(prediction_text(memory), HasSubstr("; 30.0 MiB of the host's memory"));
}

TEST(MemoryFit, TextHasTheNumbers) {
  const TrainingMemory memory = some_memory();
  const std::vector<LimitOfRanks> process = {{limit_of(MemoryLimit::Counts::private_memory, 200 * kMiB), 1}};
  EXPECT_EQ(shortage_text(*find_shortage(memory, process), memory),
            "needs 220 MiB beside 300 MiB of shared memory, which this limit does not count; there are 200 MiB: 20.0 "
            "MiB are missing\n  limit: RLIMIT_DATA: 300 MiB, of which 100 MiB are in use\n  predicted: 500 MiB = "
            "parameters 400 MiB + gradients 0 B + optimizer 0 B + activations 100 MiB + buffers 0 B; 20.0 MiB beside "
            "tensors");
  const std::vector<LimitOfRanks> mapped = {{limit_of(MemoryLimit::Counts::mappings, 200 * kMiB), 1}};
  EXPECT_THAT(shortage_text(*find_shortage(memory, mapped), memory),
              StartsWith("needs 1.39 GiB, with 900 MiB of the other ranks' memory, which this limit counts, too; there "
                         "are 200 MiB: 1.19 GiB are missing"));
  const std::vector<LimitOfRanks> node = {{limit_of(MemoryLimit::Counts::everything, 1040 * kMiB), 4}};
  EXPECT_THAT(shortage_text(*find_shortage(memory, node), memory),
              HasSubstr("needs 520 MiB; there are 1.02 GiB, for 4 ranks: 1.02 GiB are missing"));
}

std::vector<std::string> within(const TrainingShape& shape, std::int64_t bytes) {
  return remedies(shape, [bytes](const TrainingMemory& memory) { return memory.total() <= bytes; });
}

TrainingShape data_parallel(std::int64_t batch, std::int64_t seq) {
  return {.model = models::llama_flavor("50M"), .batch = batch, .seq = seq, .replicas = 4};
}

// 48 M parameters: 735 MiB of state without sharding.
TEST(MemoryFit, RemediesAreOnlyThoseThatFit) {
  const auto shape = data_parallel(4, 512);
  const std::int64_t needed = predict_memory(shape).total();
  EXPECT_THAT(within(shape, needed - 20 * kMiB),
              ElementsAre(StartsWith("parallelism.data_parallel_shard_degree = 4, parallelism.zero_stage = 1 ("),
                          StartsWith("activation_checkpoint.mode = \"full\" ("),
                          StartsWith("training.local_batch_size = 2, training.global_batch_size = 16 (")));
  // No saving of activations helps when the state alone is too much.
  TrainingShape sharded = data_parallel(1, 128);
  std::swap(sharded.replicas, sharded.shards);
  EXPECT_THAT(within(data_parallel(1, 128), predict_memory(sharded).total()),
              ElementsAre(StartsWith("parallelism.data_parallel_shard_degree = 4, parallelism.zero_stage = 3 (")));
  EXPECT_THAT(within(shape, 30 * kMiB), IsEmpty());
}

TEST(MemoryFit, RemediesAreCombinedIfNoneAloneHelps) {
  TrainingShape shape = data_parallel(1, 8192);
  TrainingShape best = shape;
  best.replicas = 1;
  best.shards = 4;
  best.recompute_every = 1;
  const auto found = within(shape, predict_memory(best).total());
  ASSERT_EQ(found.size(), 1U);
  EXPECT_THAT(found[0], StartsWith("parallelism.data_parallel_shard_degree = 4, parallelism.zero_stage = 3, "
                                   "activation_checkpoint.mode = \"full\" ("));
}

TEST(MemoryFit, ASingleRankCannotShard) {
  TrainingShape shape = data_parallel(8, 512);
  shape.replicas = 1;
  EXPECT_THAT(within(shape, predict_memory(shape).total() - 20 * kMiB),
              ElementsAre(StartsWith("activation_checkpoint.mode"), StartsWith("training.local_batch_size = 4")));
}

TEST(MemoryFit, ASmallerBatchDividesTheGlobalOne) {
  TrainingShape shape = data_parallel(9, 512);
  shape.global_batch = 72;
  const auto found = within(shape, predict_memory(shape).total() - 20 * kMiB);
  ASSERT_FALSE(found.empty());
  EXPECT_THAT(found.back(), StartsWith("training.local_batch_size = 3, training.global_batch_size = 72 ("));
}

TEST(MemoryFit, AShardedRunIsOfferedWhatItDoesNotHaveYet) {
  TrainingShape shape = data_parallel(4, 128);
  shape.replicas = 1;
  shape.shards = 4;
  shape.zero_stage = 2;
  const auto found = within(shape, predict_memory(shape).total() - 60 * kMiB);
  ASSERT_FALSE(found.empty());
  EXPECT_THAT(found[0], StartsWith("parallelism.zero_stage = 3 ("));
}

TEST(MemoryFit, AShardedMixtureIsOfferedToDivideItsExperts) {
  TrainingShape shape = data_parallel(1, 128);
  std::swap(shape.replicas, shape.shards);
  shape.model.family = models::LlamaFamily::mixtral;
  shape.model.experts = 8;
  shape.model.experts_per_token = 2;
  TrainingShape divided = shape;
  divided.expert_parallel_size = 2;
  EXPECT_THAT(within(shape, predict_memory(divided).total()),
              Contains(StartsWith("parallelism.expert_parallel_degree = 2 (")));
  EXPECT_THAT(within(shape, predict_memory(divided).total() - 1),
              Contains(StartsWith("parallelism.expert_parallel_degree = 4 (")));
}

TEST(MemoryFit, ARunThatDefersReductionIsOfferedNotTo) {
  TrainingShape shape = data_parallel(4, 8);
  std::swap(shape.replicas, shape.shards);
  shape.accumulates = true;
  shape.reduces_each_microbatch = false;
  TrainingShape other = shape;
  other.reduces_each_microbatch = true;
  EXPECT_THAT(within(shape, predict_memory(other).total()),
              Contains(StartsWith("parallelism.fsdp_reduce_each_microbatch = \"default\" (")));
  EXPECT_THAT(within(other, predict_memory(other).total() - 1),
              Not(Contains(HasSubstr("fsdp_reduce_each_microbatch"))));
}

// In stages of a pipeline, ZeRO-1 needs no more than ZeRO-2, and ZeRO-3 must reshard what it has unsharded.
TEST(MemoryFit, APipelineIsOfferedToShardItsStages) {
  TrainingShape shape = data_parallel(1, 128);
  shape.model.n_layers = 32;
  shape.pipeline = PipelineShape{schedule::make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 4}), {}};
  shape.pipeline->parts = models::balance_llama(shape.model, 2, shape.seq);
  shape.reshard_after_forward = false;
  const std::string degree = "parallelism.data_parallel_shard_degree = 4, ";
  EXPECT_THAT(within(shape, predict_memory(shape).total() - 20 * kMiB),
              ElementsAre(StartsWith(degree + "parallelism.zero_stage = 1 (")));
  TrainingShape sharded = shape;
  std::swap(sharded.replicas, sharded.shards);
  sharded.reshard_after_forward = true;
  const std::string all = "parallelism.zero_stage = 3, parallelism.fsdp_reshard_after_forward = \"always\" (";
  EXPECT_THAT(within(shape, predict_memory(sharded).total()), ElementsAre(StartsWith(degree + all)));
  EXPECT_THAT(largest_saving(shape), StartsWith(degree + all));
  // If two of its units are a large part of the model, their memory is more than what resharding saves.
  TrainingShape shallow = shape;
  shallow.model.n_layers = 2;
  shallow.pipeline->parts = models::balance_llama(shallow.model, 2, shape.seq);
  EXPECT_THAT(largest_saving(shallow), StartsWith(degree + "parallelism.zero_stage = 1 ("));
  // With few tokens the peak is at the end of a step, where stage 2 has the shards' gradients beside the full ones.
  sharded.zero_stage = 2;
  sharded.seq = 8;
  EXPECT_THAT(within(sharded, predict_memory(sharded).total() - 1),
              Contains(StartsWith("parallelism.zero_stage = 1 (")));
}

TEST(MemoryFit, SaysWhichChangeSavesMost) {
  // State is most of it: 735 MiB.
  TrainingShape shape = data_parallel(1, 128);
  TrainingShape sharded = shape;
  std::swap(sharded.replicas, sharded.shards);
  const std::int64_t present = predict_memory(shape).total(), after = predict_memory(sharded).total();
  EXPECT_EQ(largest_saving(shape), "parallelism.data_parallel_shard_degree = 4, parallelism.zero_stage = 3 (" +
                                       bytes_text(after) + " a rank, " + bytes_text(present - after) + " less)");
  // Most of it is activations, of 16 sequences at once: the smallest batch saves more than recomputing them.
  shape = data_parallel(16, 512);
  EXPECT_THAT(largest_saving(shape), StartsWith("training.local_batch_size = 1, training.global_batch_size = 64 ("));
  shape.batch = 1;
  shape.seq = 8192;
  EXPECT_THAT(largest_saving(shape), StartsWith("activation_checkpoint.mode = \"full\" ("));
  // Nothing is left to save.
  TrainingShape alone{.model = models::llama_flavor("5M"), .batch = 1, .seq = 64};
  alone.recompute_every = 1;
  EXPECT_EQ(largest_saving(alone), "");
}

TEST(MemoryFit, ComparesByCategory) {
  observe::MemoryCounts counted;
  counted[observe::MemoryCategory::parameters] = 400 * kMiB;
  counted[observe::MemoryCategory::activations] = 150 * kMiB;
  EXPECT_EQ(comparison_text(some_memory(), counted),
            "counted until then: 550 MiB of 500 MiB predicted\n"
            "    parameters    400 MiB of  400 MiB\n"
            "    gradients         0 B of      0 B\n"
            "    optimizer         0 B of      0 B\n"
            "    activations   150 MiB of  100 MiB, 50.0 MiB more\n"
            "    buffers           0 B of      0 B");
}

}  // namespace
}  // namespace phalanx::plan
