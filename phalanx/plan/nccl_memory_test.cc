#include "phalanx/plan/nccl_memory.h"

#include <gtest/gtest.h>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::plan {
namespace {

constexpr std::int64_t kPeer = std::int64_t{384} << 20;

TrainingShape shape_of(std::int64_t shards) {
  return {.model = models::llama_flavor("debug"), .shards = shards, .on_device = true, .over_nccl = true};
}

TEST(NcclMemory, IsThatOfEachCommunicator) {
  EXPECT_EQ(nccl_bytes(shape_of(1)), 0);
  EXPECT_EQ(nccl_bytes(shape_of(8)), 2 * kPeer);  // the world, and the shards
  TrainingShape shape = shape_of(8);
  shape.tensor_parallel_size = 2;
  EXPECT_EQ(nccl_bytes(shape), 3 * kPeer);
  shape.replicas = 2;
  EXPECT_EQ(nccl_bytes(shape), 4 * kPeer);
  shape.over_nccl = false;
  EXPECT_EQ(nccl_bytes(shape), 0);
}

TEST(NcclMemory, AnAllToAllConnectsEachRankWithEach) {
  TrainingShape shape = shape_of(8);
  shape.expert_parallel_size = 8;  // eight H100: 3.1 GiB were measured
  const std::int64_t of_experts = nccl_bytes(shape) - nccl_bytes(shape_of(8));
  EXPECT_EQ(of_experts, 7 * kPeer);
  EXPECT_NEAR(static_cast<double>(of_experts), 3.1 * (1 << 30), 0.5 * (1 << 30));
  shape.expert_parallel_size = 4;
  EXPECT_EQ(nccl_bytes(shape), (2 + 3 + 1) * kPeer);  // and the two ranks that share the experts
  shape = shape_of(16);
  shape.expert_parallel_size = 16;
  EXPECT_EQ(nccl_bytes(shape), (2 + 7) * kPeer + (std::int64_t{512} << 20));
}

TEST(NcclMemory, StagesAndRingsHaveNeighbours) {
  TrainingShape shape = shape_of(1);
  shape.pipeline =
      PipelineShape{.schedule = schedule::make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 4}), .parts = {}};
  EXPECT_EQ(nccl_bytes(shape), (1 + 1) * kPeer);
  shape.pipeline->schedule = schedule::make_schedule({.name = "1F1B", .ranks = 4, .micro_batches = 4});
  EXPECT_EQ(nccl_bytes(shape), (1 + 2) * kPeer);

  shape = shape_of(4);
  shape.context_parallel_size = 4;
  EXPECT_EQ(nccl_bytes(shape), 3 * kPeer);  // keys: an all_gather
  shape.gathers_keys = false;
  EXPECT_EQ(nccl_bytes(shape), 4 * kPeer);  // around a ring
  shape.exchanges_heads = true;
  EXPECT_EQ(nccl_bytes(shape), 5 * kPeer);
}

}  // namespace
}  // namespace phalanx::plan
