// Averaged gradients under FullyShardedDataParallel: when they have memory, what they are added to, and what remains of
// them after a pass that failed.
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"

namespace phalanx {
namespace {

using ddp_testing::message_of;
using ddp_testing::waves;
using fully_shard_testing::kWidth;
using fully_shard_testing::linears;
using fully_shard_testing::sharding_mesh;

/// Runs body(options) with stages 1 to 3, on the device and on the host.
void for_each_stage(const std::function<void(const FullyShardOptions&)>& body) {
  for (const bool offload : {false, true}) {
    for (const int stage : {1, 2, 3}) {
      SCOPED_TRACE(::testing::Message() << "stage " << stage << ", offload " << offload);
      body({.stage = stage, .offload = offload});
    }
  }
}

TEST(FullyShardGradients, TheirMemoryIsGoneWithThem) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for_each_stage([&](const FullyShardOptions& options) {
      auto net = linears(3);
      FullyShardedDataParallel sharded(*net, sharding_mesh(world), options);
      for (int step = 0; step < 2; ++step) {
        net->forward(waves({3, kWidth}, world->rank())).sum().backward();
        std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
        for (const auto& p : sharded.parameters()) {
          memory.emplace_back(p.tensor.grad().storage().getWeakStorageImpl());
          p.tensor.mutable_grad().reset();
        }
        // Under stage 1 they are a part of the unsharded gradients.
        const bool stays = options.stage == 1 && !options.offload;
        for (const auto& one : memory) EXPECT_EQ(one.expired(), !stays);
      }
    });
  });
}

TEST(FullyShardGradients, EachIsAddedToOrBeginsAnew) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for_each_stage([&](const FullyShardOptions& options) {
      auto net = linears(2);
      FullyShardedDataParallel sharded(*net, sharding_mesh(world), options);
      const auto pass = [&] { net->forward(waves({3, kWidth}, world->rank())).sum().backward(); };
      pass();
      std::vector<at::Tensor> once;
      for (const auto& p : sharded.parameters()) once.push_back(p.tensor.grad().clone());
      sharded.parameters()[1].tensor.mutable_grad().reset();
      pass();
      for (std::size_t i = 0; i < once.size(); ++i) {
        EXPECT_TRUE(at::equal(sharded.parameters()[i].tensor.grad(), once[i] * (i == 1 ? 1 : 2))) << i;
      }
    });
  });
}

TEST(FullyShardGradients, ThoseThatAreStillThereOutliveAHeldPass) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for_each_stage([&](const FullyShardOptions& options) {
      auto net = linears(2);
      FullyShardedDataParallel sharded(*net, sharding_mesh(world), options);
      const auto pass = [&](double phase) { net->forward(waves({3, kWidth}, phase + world->rank())).sum().backward(); };
      const auto grads = [&] {
        std::vector<at::Tensor> all;
        for (const auto& p : sharded.parameters()) all.push_back(p.tensor.grad().clone());
        for (const auto& p : sharded.parameters()) p.tensor.mutable_grad().reset();
        return all;
      };
      const auto rest = [&] {
        {
          const auto held = sharded.no_sync();
          pass(0.4);
        }
        pass(0.7);
      };
      pass(0.1);
      const auto first = grads();
      rest();
      const auto second = grads();
      pass(0.1);
      rest();
      const auto sum = grads();
      for (std::size_t i = 0; i < sum.size(); ++i) {
        EXPECT_TRUE(at::equal(sum[i], first[i] + second[i])) << sharded.parameters()[i].name;
      }
    });
  });
}

TEST(FullyShardGradients, AFailedPassLeavesNothingBehind) {
  run_local_ranks(1, [](const std::shared_ptr<Communicator>& world) {
    for (const auto reduce : {std::optional<at::ScalarType>(), std::optional(at::kDouble)}) {
      auto net = linears(2);
      FullyShardedDataParallel sharded(*net, sharding_mesh(world), {.reduce_dtype = reduce});
      const auto pass = [&](bool fails) {
        const at::Tensor x = waves({3, kWidth}, 0.0).requires_grad_();
        if (fails) x.register_hook([](const at::Tensor&) { throw Error("no"); });
        net->forward(x).sum().backward();
      };
      pass(false);
      const at::Tensor expected = sharded.parameters()[0].tensor.grad().clone();
      for (const auto& p : sharded.parameters()) p.tensor.mutable_grad().reset();
      EXPECT_EQ(message_of([&] { pass(true); }), "no");
      for (const auto& p : sharded.parameters()) p.tensor.mutable_grad().reset();
      pass(false);
      EXPECT_TRUE(at::equal(sharded.parameters()[0].tensor.grad(), expected));
    }
  });
}

TEST(FullyShardGradients, AFrozenUnitTakesNoMemoryForThem) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    auto net = linears(6);
    for (auto& p : net->named_parameters()) p.value().set_requires_grad(p.key().starts_with("0."));
    FullyShardedDataParallel sharded(*net, sharding_mesh(world));
    for (int step = 0; step < 2; ++step) {
      for (const auto& p : sharded.parameters()) p.tensor.mutable_grad().reset();
      net->forward(waves({3, kWidth}, 0.0)).sum().backward();
    }
    const auto statistics = sharded.statistics();
    const std::int64_t unit = statistics.unsharded_bytes / 2;
    EXPECT_EQ(statistics.gradient_bytes, unit);
    EXPECT_EQ(statistics.sharded_grad_bytes, unit / 2);
    EXPECT_TRUE(sharded.trained_parameters()[0].tensor.grad().defined());
  });
}

}  // namespace
}  // namespace phalanx
