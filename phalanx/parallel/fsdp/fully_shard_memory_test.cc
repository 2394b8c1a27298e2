// Measures what FullyShardedDataParallel allocates and sends: memory of ranks that are processes, by the counting
// allocator, and the operations of a step.
#include <sys/mman.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/nn/linear.h"
#include "phalanx/observe/flight_recorder.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/tensor/counting_allocator.h"

namespace phalanx {
namespace {

using ddp_testing::waves;
using fully_shard_testing::kWidth;
using fully_shard_testing::linears;
using fully_shard_testing::sharding_mesh;
using observe::MemoryCategory;
using observe::MemoryCounts;
using Operations = std::map<std::string, std::int64_t, std::less<>>;

constexpr int kBlocks = 8;
constexpr std::int64_t kBlockWidth = 256;
constexpr std::int64_t kBlockBytes = (kBlockWidth * kBlockWidth + kBlockWidth) * 4;
constexpr double kModelBytes = kBlocks * kBlockBytes;

/// Rank 0's counts. The ranks are processes that only run body(world), which returns the counts.
MemoryCounts counts_of(int ranks, const std::function<MemoryCounts(const std::shared_ptr<Communicator>& world)>& body) {
  void* page = mmap(nullptr, sizeof(MemoryCounts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* counts = new (page) MemoryCounts;
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(ranks,
                             [&](int rank) {
                               install_counting_allocator();
                               TcpStore store(server.address());
                               const auto world = make_shm_communicator(store, rank, ranks);
                               observe::reset_peak_memory_stats();
                               const MemoryCounts mine = body(world);
                               if (rank == 0) *counts = mine;
                               world->barrier();
                             }),
            "");
  const MemoryCounts result = *counts;
  munmap(page, sizeof(MemoryCounts));
  return result;
}

/// The peak of three steps, or the memory after the last one, including its gradients.
template <class Sharding>
MemoryCounts train(torch::nn::Sequential& net, const Sharding& sharding, bool peak) {
  AdamW optimizer(sharding.parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net->forward(waves({4, kBlockWidth}, step)).square().mean().backward();
    optimizer.step(1e-3);
  }
  return peak ? observe::max_memory_allocated() : observe::memory_allocated();
}

TEST(FullyShardMemory, ThePeakOfEightBlocksFalls) {
  const MemoryCounts whole = counts_of(2, [](const auto& world) {
    auto net = linears(kBlocks, kBlockWidth);
    const DistributedDataParallel ddp(*net, world);
    return train(net, ddp, /*peak=*/true);
  });
  const MemoryCounts parts = counts_of(2, [](const auto& world) {
    auto net = linears(kBlocks, kBlockWidth);
    const FullyShardedDataParallel sharded(*net, sharding_mesh(world));
    return train(net, sharded, /*peak=*/true);
  });
  // Parameters, gradients and two moments; half of them, two gathered blocks, and two blocks' gradients.
  EXPECT_NEAR(static_cast<double>(whole.total()), 4 * kModelBytes, 0.05 * 4 * kModelBytes) << whole.text();
  const double expected = 4 * kModelBytes / 2 + 4 * kBlockBytes;
  EXPECT_NEAR(static_cast<double>(parts.total()), expected, 0.05 * expected) << parts.text();
}

/// Made without memory.
struct Shell : nn::Module {
  Shell() : nn::Module("Shell") {
    for (int i = 0; i < kBlocks; ++i) {
      register_module(std::to_string(i),
                      std::make_shared<nn::Linear>(nn::LinearOptions{kBlockWidth, kBlockWidth, true},
                                                   nn::TensorOptionsOfModule{.without_memory = true}));
    }
  }
};

TEST(FullyShardMemory, WhatIsBornWithoutMemoryIsWholeAtNoMomentOfItsConstruction) {
  const MemoryCounts peak = counts_of(4, [](const auto& world) {
    Shell net;
    FullyShardedDataParallel sharded(net, sharding_mesh(world));
    sharded.initialise(7);
    return observe::max_memory_allocated();
  });
  const double expected = kModelBytes / 4 + 2 * kBlockBytes;  // its rows, and room for two unsharded blocks
  EXPECT_NEAR(static_cast<double>(peak.total()), expected, 0.05 * expected) << peak.text();
}

// The host's memory is the heap. The device's memory, between processes on the CPU, is shared windows.
TEST(FullyShardMemory, WhatIsOffloadedLiesOnTheHost) {
  struct Case {
    int stage;
    bool offload;
    double windows, heap;  // in models
  };
  for (const Case& c :
       {Case{3, false, /*shards, and room for two and two of 8 blocks*/ 1.0, /*gradients, moments*/ 1.5},
        Case{3, true, /*that room alone*/ 0.5, /*and shards*/ 2.0},
        Case{1, false, /*parameters, gradients*/ 2.0, /*moments*/ 1.0},
        Case{1, true, /*the same*/ 2.0, /*and rows of both*/ 2.0}}) {
    const MemoryCounts counts = counts_of(2, [&](const auto& world) {
      auto net = linears(kBlocks, kBlockWidth);
      const FullyShardedDataParallel sharded(*net, sharding_mesh(world), {.stage = c.stage, .offload = c.offload});
      return train(net, sharded, /*peak=*/false);
    });
    SCOPED_TRACE(::testing::Message() << "stage " << c.stage << ", offload " << c.offload << ": " << counts.text());
    const auto shared = static_cast<double>(counts.shared), all = static_cast<double>(counts.total());
    EXPECT_NEAR(shared / kModelBytes, c.windows, 0.03);
    EXPECT_NEAR((all - shared) / kModelBytes, c.heap, 0.06);
    EXPECT_NEAR(static_cast<double>(counts[MemoryCategory::optimizer]) / kModelBytes, 1.0, 0.03);
  }
}

/// The operations that `body` issues on `comm`, by kind.
Operations operations_of(const Communicator& comm, const std::function<void()>& body) {
  const auto last = comm.recent_operations();
  const std::uint64_t before = last.empty() ? 0 : last.back().seq;
  body();
  Operations result;
  for (const auto& operation : comm.recent_operations()) {
    if (last.empty() || operation.seq > before) ++result[std::string(operation.verb)];
  }
  return result;
}

TEST(FullyShardTraffic, IsReduceScatterAndAllGatherAndOneSmallSumForClipping) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for (const int stage : {1, 2, 3}) {
      SCOPED_TRACE(stage);
      auto net = linears(4);
      const DeviceMesh mesh = sharding_mesh(world);
      FullyShardedDataParallel sharded(*net, mesh, {.stage = stage});
      AdamW optimizer(sharded.parameters());
      const Communicator& comm = *mesh.communicator("dp_shard");
      for (int step = 0; step < 3; ++step) {
        const Operations passes = operations_of(comm, [&] {
          net->forward(waves({3, kWidth}, world->rank())).square().sum().backward();
        });
        // Stage 3 gathers all but the last unit again. The first step also allocates memory.
        const Operations expected = {{"all_gather", stage == 3 ? 7 : 4}, {"reduce_scatter", 4}};
        EXPECT_EQ(step == 0 ? expected : passes, expected);
        const Operations clipping =
            operations_of(*world, [&] { clip_grad_norm(sharded.parameters(), 1.0, world.get()); });
        EXPECT_EQ(clipping, (Operations{{"all_reduce", 1}}));
        EXPECT_LE(world->recent_operations().back().count, 100);
        EXPECT_EQ(operations_of(comm, [&] { optimizer.step(1e-3); }), Operations());
        optimizer.zero_grad();
      }
    }
  });
}

/// Between two micro-batches of the second step.
MemoryCounts between_micro_batches(int stage, bool defers) {
  return counts_of(2, [&](const auto& world) {
    auto net = linears(kBlocks, kBlockWidth);
    FullyShardedDataParallel sharded(*net, sharding_mesh(world), {.stage = stage});
    AdamW optimizer(sharded.parameters());
    const auto pass = [&] { net->forward(waves({4, kBlockWidth}, 0)).square().mean().backward(); };
    const auto part = [&] {
      if (defers) {
        const auto held = sharded.no_sync();
        pass();
      } else {
        const auto more = sharded.no_all_reduce();
        pass();
      }
    };
    part();
    pass();
    optimizer.step(1e-3);
    optimizer.zero_grad();
    part();
    return observe::memory_allocated();
  });
}

TEST(FullyShardMemory, BetweenMicroBatchesARankHasItsRowsOfGradients) {
  for (const int stage : {2, 3}) {
    const MemoryCounts each = between_micro_batches(stage, /*defers=*/false);
    const MemoryCounts once = between_micro_batches(stage, /*defers=*/true);
    SCOPED_TRACE(::testing::Message() << "stage " << stage << ": " << each.text() << "; deferred " << once.text());
    const auto in_models = [](std::int64_t bytes) { return static_cast<double>(bytes) / kModelBytes; };
    const double gathered = stage == 3 ? 0.25 : 0;  // two of eight blocks
    EXPECT_NEAR(in_models(each[MemoryCategory::gradients]), 0.5, 0.03);
    EXPECT_NEAR(in_models(each[MemoryCategory::buffers]), gathered + 0.25, 0.03);
    EXPECT_NEAR(in_models(once[MemoryCategory::gradients]), 0.0, 0.03);
    EXPECT_NEAR(in_models(once[MemoryCategory::buffers]), gathered + 1.0, 0.03);
  }
}

// Three micro-batches of four units; two copies of the shards on two ranks each.
TEST(FullyShardTraffic, OfAccumulationByStageAndSetting) {
  run_local_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    for (const int stage : {1, 2, 3}) {
      for (const bool defers : {false, true}) {
        SCOPED_TRACE(::testing::Message() << "stage " << stage << (defers ? ", deferred" : ""));
        auto net = linears(4);
        const DeviceMesh mesh = sharding_mesh(world, 2);
        FullyShardedDataParallel sharded(*net, mesh, {.stage = stage});
        const Communicator &shards = *mesh.communicator("dp_shard"), &copies = *mesh.communicator("dp_replicate");
        const auto pass = [&] { net->forward(waves({3, kWidth}, world->rank())).square().sum().backward(); };
        for (int step = 0; step < 2; ++step) {
          for (int number = 0; number < 3; ++number) {
            const bool is_last = number == 2;
            Operations among_copies;
            const Operations among_shards = operations_of(shards, [&] {
              among_copies = operations_of(copies, [&] {
                if (is_last) {
                  pass();
                } else if (defers) {
                  const auto held = sharded.no_sync();
                  pass();
                } else {
                  const auto more = sharded.no_all_reduce();
                  pass();
                }
              });
            });
            SCOPED_TRACE(::testing::Message() << "micro-batch " << number << " of step " << step);
            EXPECT_EQ(among_copies, is_last ? (Operations{{"all_reduce", 4}}) : Operations());
            const bool reduces = is_last || (stage > 1 && !defers);
            const auto scatters = among_shards.find("reduce_scatter");
            EXPECT_EQ(scatters == among_shards.end() ? 0 : scatters->second, reduces ? 4 : 0);
            // Stage 3 gathers all but the last unit again. What stays unsharded is gathered once per step.
            const auto gathers = among_shards.find("all_gather");
            const std::int64_t expected = stage == 3 ? 7 : number == 0 ? 4 : 0;
            // The first step also allocates memory.
            if (step > 0) {
              EXPECT_EQ(gathers == among_shards.end() ? 0 : gathers->second, expected);
            }
          }
          for (const auto& p : sharded.parameters()) p.tensor.mutable_grad().reset();
        }
      }
    }
  });
}

}  // namespace
}  // namespace phalanx
