#include "phalanx/parallel/replica_check.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/nn/init.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"
#include "phalanx/tensor/counting_allocator.h"

namespace phalanx {
namespace {

using ddp_testing::message_of;
using ddp_testing::waves;
using fully_shard_testing::kWidth;
using fully_shard_testing::linears;
using fully_shard_testing::sharding_mesh;

void flip_bit(const at::Tensor& tensor, std::int64_t bit = 0) {
  static_cast<unsigned char*>(tensor.data_ptr())[bit / 8] ^= static_cast<unsigned char>(1U << (bit % 8));
}

std::int64_t number_of(const at::Tensor& tensor) { return hash_of_bits(tensor).item<std::int64_t>(); }

TEST(ReplicaCheck, EveryBitAndPlaceCountsInTheHash) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong, at::kByte}) {
    const at::Tensor tensor = at::arange(1, 38).to(dtype);
    const std::int64_t before = number_of(tensor);
    std::set<std::int64_t> hashes = {before};
    const auto bits = static_cast<std::int64_t>(tensor.nbytes()) * 8;
    for (std::int64_t bit = 0; bit < bits; ++bit) {
      flip_bit(tensor, bit);
      EXPECT_TRUE(hashes.insert(number_of(tensor)).second) << "bit " << bit;
      flip_bit(tensor, bit);
    }
    EXPECT_EQ(number_of(tensor), before);
    EXPECT_NE(number_of(tensor.flip(0)), before);
  }
  EXPECT_NE(number_of(at::zeros({2})), number_of(at::zeros({2}).neg()));
  EXPECT_EQ(number_of(waves({6, 4}, 0).t()), number_of(waves({6, 4}, 0).t().contiguous()));
  EXPECT_EQ(number_of(at::zeros({0, 3})), 0);
  EXPECT_EQ(hash_of_bits(at::ones({})).dim(), 0);
}

// In a separate process, whose allocator counts.
TEST(ReplicaCheck, TakesHardlyAnyMemory) {
  EXPECT_EQ(run_forked_ranks(1,
                             [](int) {
                               install_counting_allocator();
                               at::set_num_threads(1);
                               const at::Tensor tensor = at::ones({8 << 20});
                               const std::int64_t before = observe::memory_allocated().total();
                               observe::reset_peak_memory_stats();
                               hash_of_bits(tensor);
                               const std::int64_t taken = observe::max_memory_allocated().total() - before;
                               if (taken > (600 << 10)) {
                                 throw Error(fmt::format("the hash took {} bytes beside its tensor", taken));
                               }
                             }),
            "");
}

TEST(ReplicaCheck, LargeTensorsAreHashedInParts) {
  const at::Tensor tensor = at::zeros({(1 << 20) + 5});
  const std::int64_t before = number_of(tensor);
  std::set<std::int64_t> hashes = {before};
  for (const std::int64_t element : {std::int64_t{0}, std::int64_t{(1 << 15) - 1}, std::int64_t{1} << 15,
                                     std::int64_t{1} << 20, tensor.numel() - 1}) {
    for (const std::int64_t bit : {0, 31}) {
      flip_bit(tensor, 32 * element + bit);
      EXPECT_TRUE(hashes.insert(number_of(tensor)).second) << element << " " << bit;
      flip_bit(tensor, 32 * element + bit);
    }
  }
}

TEST(ReplicaCheck, AFlippedBitOfAReplicaIsNamedOnEveryRank) {
  run_local_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    auto net = linears(3);
    DistributedDataParallel ddp(*net, world);
    AdamW optimizer(ddp.parameters());
    const auto all = [&] {
      TrainState state;
      optimizer.collect_state(state);
      auto tensors = nn::named_parameters(*net);
      tensors.insert(tensors.end(), state.tensors.begin(), state.tensors.end());
      return tensors;
    };
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      net->forward(waves({3, kWidth}, world->rank())).square().mean().backward();
      optimizer.step(1e-3);
      check_replicas(all(), *world, "in between");
    }
    for (const char* name : {"2.weight", "optimizer.4.bias.exp_avg_sq"}) {
      const auto tensors = all();
      const auto found = std::ranges::find(tensors, std::string(name), &NamedTensor::name);
      if (world->rank() == 2) flip_bit(found->tensor, 5);
      const std::string message = message_of([&] { check_replicas(tensors, *world, "after step 2"); });
      EXPECT_THAT(message,
                  AllOf(HasSubstr("replica check after step 2: of 24 tensors, 1 differs"),
                        HasSubstr("'" + std::string(name) + "': ranks 0, 1, 3 have "), HasSubstr("; rank 2 has ")));
      for (const std::string& other : world->all_gather_bytes(message)) EXPECT_EQ(other, message);
      if (world->rank() == 2) flip_bit(found->tensor, 5);
    }
    check_replicas(all(), *world, "after that");
  });
}

// Only shards that are copies of each other are compared.
TEST(ReplicaCheck, ShardsAreComparedWithTheirCopies) {
  run_local_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    auto net = linears(3);
    const FullyShardedDataParallel sharded(*net, sharding_mesh(world, 2));
    check_replicas(sharded.parameters(), *world, "at first");
    const NamedTensor& some = sharded.parameters()[2];
    if (world->rank() == 3 && some.tensor.numel() > 0) flip_bit(some.tensor);
    EXPECT_THAT(
        message_of([&] { check_replicas(sharded.parameters(), *world, "at last"); }),
        AllOf(HasSubstr("'" + some.name + "': rank 1 has "), HasSubstr("; rank 3 has "), Not(HasSubstr("rank 0"))));
  });
}

// What only one rank has is not compared. A rank without any of the differing tensors learns their names, too.
TEST(ReplicaCheck, RanksMayListDifferentTensors) {
  run_local_ranks(3, [](const std::shared_ptr<Communicator>& world) {
    std::vector<NamedTensor> tensors = {{"own" + std::to_string(world->rank()), waves({4}, world->rank())}};
    const at::Tensor tied = waves({5, 2}, 0);
    if (world->rank() != 1) tensors.push_back({"tied", tied});
    if (world->rank() == 0) tensors.push_back({"tied", tied.clone()});
    check_replicas(tensors, *world, "now");
    if (world->rank() == 0) flip_bit(tensors.back().tensor, 77);
    EXPECT_THAT(message_of([&] { check_replicas(tensors, *world, "now"); }),
                AllOf(HasSubstr("'tied': ranks 0, 2 have "), HasSubstr("; rank 0 has ")));
  });
}

TEST(ReplicaCheck, ManyDifferencesAreCounted) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    std::vector<NamedTensor> tensors;
    for (int i = 0; i < 14; ++i) tensors.push_back({"t" + std::to_string(i), waves({3}, i + world->rank())});
    EXPECT_THAT(message_of([&] { check_replicas(tensors, *world, "now"); }),
                AllOf(HasSubstr("of 14 tensors, 14 differ between"), HasSubstr("'t9'"), Not(HasSubstr("'t10'")),
                      HasSubstr("and 4 more")));
  });
}

}  // namespace
}  // namespace phalanx
