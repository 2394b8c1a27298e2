// What becomes a unit of FullyShardedDataParallel: nested units, modules without any unit, and modules that two units
// share.
#include <ATen/ops/relu.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/module.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx {
namespace {

using ddp_testing::waves;
using fully_shard_testing::expect_trains_as_ddp;
using fully_shard_testing::kShardedSteps;
using fully_shard_testing::kWidth;
using fully_shard_testing::sharding_mesh;

constexpr std::int64_t kNestWidth = 31;  // so that half a layer is a whole number of rows
constexpr std::int64_t kNestBytes = 2 * (kNestWidth * kNestWidth + kNestWidth) * 4;
constexpr int kNests = 3;

/// Two layers, and between them another such module, one level smaller.
struct Nest : nn::Module {
  explicit Nest(int levels) : nn::Module("Nest") {
    const nn::LinearOptions options{kNestWidth, kNestWidth, true};
    first = register_module("first", std::make_shared<nn::Linear>(options));
    if (levels > 1) inner = register_module("inner", std::make_shared<Nest>(levels - 1));
    last = register_module("last", std::make_shared<nn::Linear>(options));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = at::tanh(nn::call(first, x));
    // Uses a separate tensor: recomputed or not, no more than two gradients are added up anywhere.
    if (inner) y = y + nn::call(inner, at::tanh(y));
    return x + nn::call(last, y);
  }
  std::shared_ptr<nn::Linear> first, last;
  std::shared_ptr<Nest> inner;
};

/// All Nests are units, including nested ones.
struct Nests : nn::Module {
  explicit Nests(int levels) : nn::Module("Nests") {
    for (int i = 0; i < kNests; ++i)
      list.push_back(register_module("n" + std::to_string(i), std::make_shared<Nest>(levels)));
    nn::initialise(*this, 4);
  }
  std::vector<std::vector<nn::Module*>> shard_units() override {
    std::vector<std::vector<nn::Module*>> units;
    for (const auto& outer : list) {
      for (Nest* nest = outer.get(); nest != nullptr; nest = nest->inner.get()) units.push_back({nest});
    }
    return units;
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& nest : list) x = nn::call(nest, x);
    return x;
  }
  std::vector<std::shared_ptr<Nest>> list;
};

const auto kCall = [](auto& net, const at::Tensor& x, auto*) { return nn::call(net, x); };

TEST(FullyShardUnits, InsideUnitsTrainAsUnderDataParallelism) {
  for (const int ranks : {1, 2, 3}) {
    for (const int levels : {2, 3}) {
      for (const FullyShardOptions& options :
           {FullyShardOptions{.stage = 3}, FullyShardOptions{.stage = 1},
            FullyShardOptions{.reshard_after_forward = false}, FullyShardOptions{.stage = 3, .prefetch = false}}) {
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << levels << " levels, stage " << options.stage);
        run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
          Nests a(levels), b(levels);
          const auto units = static_cast<std::size_t>(kNests * levels);
          expect_trains_as_ddp(world, a, b, kNestWidth, units, kCall, options);
        });
      }
    }
  }
}

TEST(FullyShardUnits, InsideUnitsTakeOnePieceOfMemoryMoreForEachLevel) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for (const int levels : {1, 2, 3}) {
      SCOPED_TRACE(levels);
      Nests a(levels), b(levels);
      const auto units = static_cast<std::size_t>(kNests * levels);
      const auto sharded = expect_trains_as_ddp(world, a, b, kNestWidth, units, kCall);
      EXPECT_EQ(sharded.padding_bytes, 0);
      EXPECT_EQ(sharded.shard_bytes, kNests * levels * kNestBytes / 2);
      EXPECT_EQ(sharded.unsharded_bytes, (levels + 1) * kNestBytes);
      EXPECT_EQ(sharded.gradient_bytes, (levels + 1) * kNestBytes);
      // The last Nest stays unsharded from the forward to the backward pass. Only the first has to be waited for.
      EXPECT_EQ(sharded.gathers, kShardedSteps * levels * (kNests + kNests - 1));
      EXPECT_EQ(sharded.prefetches, sharded.gathers - kShardedSteps);
      Nests c(levels), d(levels);
      EXPECT_EQ(expect_trains_as_ddp(world, c, d, kNestWidth, units, kCall, {.stage = 1}).unsharded_bytes, 0);
    }
  });
}

enum class Recompute { nothing, outer, inner, all, all_but_costly };

/// Nests whose units are recomputed in the backward pass.
void recompute(Nests& nests, Recompute which) {
  for (const auto& outer : nests.list) {
    for (Nest* nest = outer.get(); nest != nullptr; nest = nest->inner.get()) {
      const bool is_outer = nest == outer.get();
      if (which == Recompute::nothing || which == (is_outer ? Recompute::inner : Recompute::outer)) continue;
      checkpoint_activations(*nest,
                             which == Recompute::all_but_costly ? kernels::CheckpointPolicy(op_sac_policy) : nullptr);
    }
  }
}

// A unit is gathered once for its recomputation and its backward pass together, in the existing memory.
TEST(FullyShardUnits, InsideUnitsMayBeReplicatedAccumulatedAndRecomputed) {
  using enum Recompute;
  struct Case {
    int ranks, replicas, group, micro_batches;
    Recompute recomputed;
  };
  for (const auto& [ranks, replicas, group, micro_batches, recomputed] :
       {Case{4, 2, 0, 1, nothing}, Case{4, 2, 0, 3, nothing}, Case{2, 1, 0, 3, nothing}, Case{3, 1, 0, 2, all},
        Case{2, 1, 0, 1, outer}, Case{2, 1, 0, 1, inner}, Case{2, 1, 0, 1, all}, Case{2, 1, 0, 1, all_but_costly},
        Case{2, 1, 0, 2, outer}, Case{2, 1, 0, 2, inner}, Case{4, 2, 0, 2, all}, Case{4, 1, 2, 1, nothing},
        Case{4, 1, 2, 2, all}}) {
    for (const int levels : {2, 3}) {
      for (const int stage : {1, 2, 3}) {
        if (group > 0 && stage < 3) continue;
        run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
          // Here, as ranks are threads.
          SCOPED_TRACE(::testing::Message()
                       << ranks << " ranks, " << replicas << " replicas, groups of " << group << ", " << micro_batches
                       << " micro-batches, " << levels << " levels, stage " << stage << ", recomputed "
                       << static_cast<int>(recomputed));
          Nests a(levels), b(levels);
          recompute(b, recomputed);
          const auto units = static_cast<std::size_t>(kNests * levels);
          const auto sharded =
              expect_trains_as_ddp(world, a, b, kNestWidth, units, kCall, {.stage = stage, .reshard_group = group},
                                   {.replicas = replicas, .micro_batches = micro_batches});
          const int gathers = stage < 3 ? kNests : micro_batches * (kNests + kNests - 1);
          EXPECT_EQ(sharded.gathers, kShardedSteps * levels * gathers);
          const std::int64_t padded = kNestBytes + sharded.padding_bytes / (kNests * levels);
          EXPECT_EQ(sharded.unsharded_bytes, stage < 3 ? 0 : (levels + 1) * padded);
        });
      }
    }
  }
}

TEST(FullyShardUnits, AroundUnitsStayWhileThoseAreUsed) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Nests net(2);
    int looks = 0;
    std::vector<GradReadySubscription> subscriptions;
    const auto gathered = [&] {
      std::int64_t count = 0;
      for (const auto& nest : net.list)
        count += has_memory(nest->first->weight) + has_memory(nest->inner->first->weight);
      return count;
    };
    FullyShardedDataParallel sharded(net, sharding_mesh(world));
    EXPECT_THAT(sharded.units()[0], ElementsAre("n0.first.weight", "n0.first.bias", "n0.last.weight", "n0.last.bias"));
    EXPECT_EQ(sharded.units()[1][0], "n0.inner.first.weight");
    for (const auto& nest : net.list) {
      const auto look = [&looks, &gathered, nest] {
        ++looks;
        EXPECT_TRUE(has_memory(nest->first->weight) && has_memory(nest->inner->first->weight));
        EXPECT_LE(gathered(), 3);
      };
      nest->inner->add_pre_forward_hook([look](nn::Module&) { look(); });
      subscriptions.push_back(on_grad_ready(nest->inner->first->weight, [look](const at::Tensor&) { look(); }));
    }
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(gathered(), 0);
      nn::call(net, waves({5, kNestWidth}, step)).sum().backward();
    }
    EXPECT_EQ(gathered(), 0);
    EXPECT_EQ(looks, 2 * 2 * kNests);
  });
}

// Units are joined in the order of use, also across the end of the enclosing unit.
TEST(FullyShardUnits, InsideUnitsThatAreSmallAreJoined) {
  for (const std::int64_t smallest : {kNestBytes / 4 + 1, 3 * kNestBytes / 8 + 1, 3 * kNestBytes / 4 - 1}) {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      Nests a(3), b(3);
      const std::size_t units = smallest > 3 * kNestBytes / 8 + 1 ? 3 : 4;
      expect_trains_as_ddp(world, a, b, kNestWidth, units, kCall, {.smallest_unit = smallest});
    });
  }
}

// The nets of docs/fsdp_your_net.md.
namespace before {
struct Net : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(12, 24));
  torch::nn::Linear b = register_module("b", torch::nn::Linear(24, 12));
  at::Tensor forward(const at::Tensor& x) { return b(torch::relu(a(x))); }
};
}  // namespace before

namespace after {
struct Net : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(12, 24));
  torch::nn::Linear b = register_module("b", torch::nn::Linear(24, 12));
  torch::nn::Sequential body = register_module("body", torch::nn::Sequential(a, torch::nn::ReLU(), b));
  at::Tensor forward(const at::Tensor& x) { return body->forward(x); }
};
}  // namespace after

/// The log output of sharding Net on two ranks, while it trains as under DDP.
template <class Net>
std::string warnings_of(std::size_t units, std::int64_t& whole_bytes) {
  ::testing::internal::CaptureStderr();
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    before::Net a;
    Net b;
    for (torch::nn::Module* net : {static_cast<torch::nn::Module*>(&a), static_cast<torch::nn::Module*>(&b)}) {
      nn::initialise(*net, 7);
    }
    const auto run = [](auto& net, const at::Tensor& x, FullyShardedDataParallel* sharded) {
      return sharded != nullptr ? sharded->run(net, x) : net.forward(x);
    };
    const auto statistics = expect_trains_as_ddp(world, a, b, kWidth, units, run);
    if (world->rank() == 0) whole_bytes = statistics.shard_bytes;
  });
  return ::testing::internal::GetCapturedStderr();
}

TEST(FullyShardUnits, AModuleWithoutAnyIsOneWithAWarningUntilItsChildrenStandInASequential) {
  std::int64_t one = 0, two = 0;
  EXPECT_THAT(warnings_of<before::Net>(1, one),
              AllOf(HasSubstr("warning - fully_shard: "), HasSubstr("before::Net has no parts that say when"),
                    HasSubstr("it is one unit, whose 2.50 KiB of parameters"), HasSubstr("docs/fsdp_your_net.md")));
  EXPECT_THAT(warnings_of<after::Net>(2, two), Not(HasSubstr("fully_shard")));
  // The bytes of the warning no longer stay unsharded: half of them belong to the other rank.
  EXPECT_GE(one, (2 * 12 * 24 + 12 + 24) * 4);
  EXPECT_LE(two, one / 2 + 64);
}

/// A private layer, and one that other modules share.
struct Sharing : torch::nn::Module {
  explicit Sharing(torch::nn::Linear layer) : shared(register_module("shared", std::move(layer))) {}
  at::Tensor forward(const at::Tensor& x) { return shared(at::tanh(own(x))); }
  torch::nn::Linear own = register_module("own", torch::nn::Linear(kWidth, kWidth));
  torch::nn::Linear shared;
};

torch::nn::Sequential sharing(bool inside) {
  const torch::nn::Linear shared(kWidth, kWidth);
  auto net = inside ? torch::nn::Sequential(std::make_shared<Sharing>(shared), std::make_shared<Sharing>(shared))
                    : torch::nn::Sequential(shared, torch::nn::Tanh(), torch::nn::Linear(kWidth, kWidth), shared);
  nn::initialise(*net, 5);
  return net;
}

// A module that two units of a Sequential use, directly or inside each, belongs to neither: it stays unsharded.
TEST(FullyShardUnits, AModuleThatTwoUnitsShareStaysGathered) {
  const auto run = [](auto& net, const at::Tensor& x, FullyShardedDataParallel* sharded) {
    return sharded != nullptr ? sharded->run(net, x) : net.forward(x);
  };
  for (const int ranks : {1, 2, 3}) {
    for (const int stage : {1, 3}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, stage " << stage);
      run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
        for (const bool inside : {false, true}) {
          auto a = sharing(inside), b = sharing(inside), c = sharing(inside);
          expect_trains_as_ddp(world, *a, *b, kWidth, inside ? 3 : 2, run, {.stage = stage});
          const FullyShardedDataParallel sharded(*c, sharding_mesh(world), {.stage = stage});
          const std::string name = inside ? "0.shared." : "0.";
          EXPECT_THAT(sharded.units()[0], ElementsAre(name + "weight", name + "bias"));
          EXPECT_TRUE(has_memory(c->named_parameters()[name + "weight"]));
        }
      });
    }
  }
}

}  // namespace
}  // namespace phalanx
