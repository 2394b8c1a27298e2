// Gradient accumulation under FullyShardedDataParallel: reduced in every micro-batch (no_all_reduce()), or once
// (no_sync()).
#include <ATen/ops/full.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/loss_scaler.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"

namespace phalanx {
namespace {

using ddp_testing::message_of;
using ddp_testing::waves;
using fully_shard_testing::expect_equal;
using fully_shard_testing::kWidth;
using fully_shard_testing::linears;
using fully_shard_testing::sharding_mesh;
using fully_shard_testing::whole;

constexpr int kParts = 3;

struct Accumulating {
  torch::nn::Sequential net;
  std::unique_ptr<FullyShardedDataParallel> sharded;

  Accumulating(const std::shared_ptr<Communicator>& world, FullyShardOptions options, int replicas = 1)
      : net(linears(4)),
        sharded(std::make_unique<FullyShardedDataParallel>(*net, sharding_mesh(world, replicas), options)) {}

  void part(int number, double rank, double factor = 1) {
    net->forward(waves({3, kWidth}, rank + 0.3 * number)).square().mean().mul(factor).backward();
  }
  /// All micro-batches; the last one publishes gradients.
  void step(double rank) {
    for (int number = 0; number < kParts; ++number) {
      std::optional<FullyShardedDataParallel::NoAllReduce> more;
      if (number + 1 < kParts) more.emplace(sharded->no_all_reduce());
      part(number, rank);
    }
  }
  /// The whole gradients from the shards' gradients, which are reset.
  std::vector<NamedTensor> take_gradients(Communicator& world) const {
    std::vector<NamedTensor> gradients;
    for (const auto& p : sharded->parameters()) {
      gradients.push_back({p.name, p.tensor.grad(), p.shard});
      p.tensor.mutable_grad().reset();
    }
    return whole(gradients, world);
  }
};

/// The sum of each part's own gradients, in the order of the parts and in float32.
std::vector<NamedTensor> sum_of_parts(Accumulating& run, Communicator& world) {
  std::vector<NamedTensor> sum;
  for (int number = 0; number < kParts; ++number) {
    run.part(number, world.rank());
    const auto gradients = run.take_gradients(world);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (number == 0) {
        sum.push_back({gradients[i].name, gradients[i].tensor.to(at::kFloat)});
      } else {
        sum[i].tensor.add_(gradients[i].tensor);
      }
    }
  }
  return sum;
}

TEST(FullyShardAccumulation, IsTheSumOfTheMicroBatchesAveragesInTheirOrder) {
  for (const int ranks : {2, 3, 4}) {
    for (const int stage : {2, 3}) {
      for (const bool offload : {false, true}) {
        for (const auto reduce : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
          run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
            SCOPED_TRACE(::testing::Message() << ranks << " ranks, stage " << stage << (offload ? ", offload" : "")
                                              << (reduce ? ", bfloat16" : ""));
            Accumulating run(world, {.stage = stage, .offload = offload, .reduce_dtype = reduce});
            const auto expected = sum_of_parts(run, *world);
            for (int step = 0; step < 2; ++step) {
              run.step(world->rank());
              EXPECT_EQ(run.sharded->parameters()[0].tensor.grad().scalar_type(), at::kFloat);
              expect_equal(run.take_gradients(*world), expected);
            }
          });
        }
      }
    }
  }
}

// The order of the sum differs from that of whole gradients: rounding, relative to gradients of about 1.
TEST(FullyShardAccumulation, IsWithinRoundingOfDataParallelismAndDeferredItsBits) {
  for (const int stage : {1, 2, 3}) {
    run_local_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
      SCOPED_TRACE(stage);
      auto plain = linears(4);
      DistributedDataParallel ddp(*plain, world);
      for (int number = 0; number < kParts; ++number) {
        std::optional<DistributedDataParallel::NoSync> held;
        if (number + 1 < kParts) held.emplace(ddp.no_sync());
        plain->forward(waves({3, kWidth}, world->rank() + 0.3 * number)).square().mean().backward();
      }
      std::vector<NamedTensor> expected;
      for (const auto& p : ddp.parameters()) expected.push_back({p.name, p.tensor.grad()});

      Accumulating run(world, {.stage = stage});
      run.step(world->rank());
      const auto each = run.take_gradients(*world);
      for (const auto& gradient : expected) {
        const auto found = std::ranges::find(each, gradient.name, &NamedTensor::name);
        EXPECT_TRUE(at::allclose(found->tensor, gradient.tensor, 1e-6, 1e-7)) << gradient.name;
      }
      if (stage == 1) expect_equal(each, expected);  // its unsharded gradients stay anyway

      for (int number = 0; number < kParts; ++number) {
        std::optional<FullyShardedDataParallel::NoSync> held;
        if (number + 1 < kParts) held.emplace(run.sharded->no_sync());
        run.part(number, world->rank());
      }
      expect_equal(run.take_gradients(*world), expected);
    });
  }
}

TEST(FullyShardAccumulation, KeepsNoWholeGradients) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for (const int stage : {2, 3}) {
      Accumulating run(world, {.stage = stage});
      run.step(world->rank());
      const std::int64_t unit = run.sharded->statistics().gradient_bytes / 2;
      EXPECT_NEAR(static_cast<double>(unit), (kWidth * kWidth + kWidth) * 4, 0.25 * static_cast<double>(unit));
      EXPECT_EQ(run.sharded->statistics().reduced_bytes, kParts * 4 * unit);
      EXPECT_EQ(run.sharded->statistics().synchronisations, 1);
      {
        const auto held = run.sharded->no_sync();
        run.part(0, world->rank());
      }
      EXPECT_EQ(run.sharded->statistics().gradient_bytes, 4 * unit);
    }
  });
}

TEST(FullyShardAccumulation, CopiesAverageTheSum) {
  for (const bool offload : {false, true}) {
    for (const auto reduce : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
      run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
        Accumulating run(world, {.offload = offload, .reduce_dtype = reduce}, /*replicas=*/2);
        const auto expected = sum_of_parts(run, *world);
        run.step(world->rank());
        const auto found = run.take_gradients(*world);
        const double tolerance = reduce ? 0.02 : 1e-5;
        for (std::size_t i = 0; i < found.size(); ++i) {
          EXPECT_TRUE(at::allclose(found[i].tensor.to(at::kFloat), expected[i].tensor, tolerance, tolerance))
              << found[i].name;
        }
        // Every copy has the same bits.
        for (const auto& gradient : found) {
          at::Tensor first = gradient.tensor.clone();
          world->broadcast(first, {.root = 0});
          EXPECT_TRUE(at::equal(first, gradient.tensor));
        }
      });
    }
  }
}

TEST(FullyShardAccumulation, AnOverflowInAMiddleMicroBatchSkipsTheStepAndNothingElse) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const auto train = [&](bool overflows) {
      Accumulating run(world, {.param_dtype = at::kHalf, .reduce_dtype = at::kHalf, .output_dtype = at::kFloat});
      Sgd optimizer(run.sharded->parameters());
      LossScaler scaler({.initial_scale = 64});
      std::vector<bool> stepped;
      for (int step = 0; step < (overflows ? 3 : 2); ++step) {
        for (int number = 0; number < kParts; ++number) {
          std::optional<FullyShardedDataParallel::NoAllReduce> more;
          if (number + 1 < kParts) more.emplace(run.sharded->no_all_reduce());
          const bool here = overflows && step == 1 && number == 1 && world->rank() == 1;
          run.part(number, world->rank(), (here ? std::numeric_limits<double>::infinity() : 1) * scaler.scale());
        }
        stepped.push_back(scaler.step(optimizer, 0.1, {.max_norm = 1e-3, .comm = world.get()}).stepped);
        optimizer.zero_grad();
      }
      EXPECT_EQ(stepped, overflows ? (std::vector<bool>{true, false, true}) : (std::vector<bool>{true, true}));
      return whole(run.sharded->parameters(), *world);
    };
    const auto expected = train(false), found = train(true);
    // Scales are powers of two, but in float16 small gradients lose bits under the smaller one.
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::allclose(found[i].tensor, expected[i].tensor, 1e-4, 1e-6)) << found[i].name;
    }
  });
}

TEST(FullyShardAccumulation, ClippingSeesTheSum) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Accumulating run(world, {});
    const auto expected = sum_of_parts(run, *world);
    double squares = 0;
    for (const auto& gradient : expected) squares += gradient.tensor.to(at::kDouble).square().sum().item<double>();
    run.step(world->rank());
    const double norm = clip_grad_norm(run.sharded->parameters(), 1e-3, world.get()).value();
    EXPECT_NEAR(norm, std::sqrt(squares), 1e-9);
    EXPECT_NEAR(grad_norm(run.sharded->parameters(), world.get()).value(), 1e-3, 1e-6);
  });
}

TEST(FullyShardAccumulation, GradientsThatAreStillThereAreAddedTo) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Accumulating run(world, {});
    run.step(world->rank());
    const auto once = run.take_gradients(*world);
    run.step(world->rank());
    run.step(world->rank());
    const auto twice = run.take_gradients(*world);
    for (std::size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(at::equal(twice[i].tensor, once[i].tensor * 2));
  });
}

struct TwoBranches : torch::nn::Module {
  torch::nn::Sequential one = register_module("one", linears(2)), other = register_module("other", linears(1));
};

TEST(FullyShardAccumulation, AMicroBatchThatLeavesAParameterOutIsAnError) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const auto net = std::make_shared<TwoBranches>();
    FullyShardedDataParallel sharded(*net, sharding_mesh(world));
    const auto more = sharded.no_all_reduce();
    const at::Tensor x = waves({3, kWidth}, world->rank());
    net->one->forward(x).add(net->other->forward(x)).sum().backward();
    EXPECT_THAT(message_of([&] { net->one->forward(x).sum().backward(); }),
                HasSubstr("gave no gradient to 2 parameters: 'other.0.weight', 'other.0.bias'"));
  });
}

TEST(FullyShardAccumulation, AFailedMicroBatchLeavesNothingOfTheStep) {
  run_local_ranks(1, [](const std::shared_ptr<Communicator>& world) {
    Accumulating run(world, {.reduce_dtype = at::kDouble});
    run.step(world->rank());
    const auto expected = run.take_gradients(*world);
    {
      const auto more = run.sharded->no_all_reduce();
      run.part(0, world->rank());
      const at::Tensor x = waves({3, kWidth}, 0.0).requires_grad_();
      x.register_hook([](const at::Tensor&) { throw Error("no"); });
      EXPECT_EQ(message_of([&] { run.net->forward(x).sum().backward(); }), "no");
    }
    run.step(world->rank());
    expect_equal(run.take_gradients(*world), expected);
  });
}

}  // namespace
}  // namespace phalanx
