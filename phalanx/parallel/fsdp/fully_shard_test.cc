// Sharded data parallelism on plain modules: what becomes a unit, which of it has memory when, and what is refused.
// models/sharded_equivalence_test.cc checks the values; here they are checked only for plain modules.
#include "phalanx/parallel/fsdp/fully_shard.h"

#include <ATen/ops/zeros.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/nn/fused_linear.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/module.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx {
namespace {

using ddp_testing::message_of;
using ddp_testing::Mlp;
using ddp_testing::waves;
using fully_shard_testing::expect_trains_as_ddp;
using fully_shard_testing::linears;
using fully_shard_testing::whole;

DeviceMesh mesh_of(const std::shared_ptr<Communicator>& world) { return {world, {{"dp_shard", world->size()}}}; }

TEST(FullyShard, ASequentialTrainsAsUnderDataParallelism) {
  for (const int ranks : {1, 2, 3}) {
    run_local_ranks(ranks, [](const std::shared_ptr<Communicator>& world) {
      auto a = linears(3, 10), b = linears(3, 10);
      expect_trains_as_ddp(world, *a, *b, 10, 3, [](auto& net, const at::Tensor& x, auto*) { return net.forward(x); });
    });
  }
}

/// [gate; up] as one product, and back.
struct FusedBlock : nn::Module {
  FusedBlock() : nn::Module("FusedBlock") {
    const std::vector<nn::FusedPart> parts = {{"gate", 6, true}, {"up", 6}};
    inner = register_module("inner", std::make_shared<nn::FusedLinear>(10, parts));
    down = register_module("down", std::make_shared<nn::Linear>(nn::LinearOptions{6, 10}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = inner->parts(nn::call(inner, x));
    return nn::call(down, at::tanh(y[0]) * y[1]);
  }
  std::shared_ptr<nn::FusedLinear> inner;
  std::shared_ptr<nn::Linear> down;
};

struct FusedBlocks : nn::Module {
  FusedBlocks() : nn::Module("FusedBlocks") {
    for (const char* name : {"a", "b"}) list.push_back(register_module(name, std::make_shared<FusedBlock>()));
    nn::initialise(*this, 4);
  }
  std::vector<std::vector<nn::Module*>> shard_units() override { return {{list[0].get()}, {list[1].get()}}; }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : list) x = x + nn::call(block, x);
    return x;
  }
  std::vector<std::shared_ptr<FusedBlock>> list;
};

// A unit has its own order, so the parts are not adjacent: the product is the same.
TEST(FullyShard, FusedLayersTrainAsUnderDataParallelism) {
  for (const int ranks : {1, 2, 3}) {
    run_local_ranks(ranks, [](const std::shared_ptr<Communicator>& world) {
      FusedBlocks a, b;
      expect_trains_as_ddp(world, a, b, 10, 2, [](auto& net, const at::Tensor& x, auto*) { return nn::call(net, x); });
    });
  }
}

// Runs a callback while its parameters are in use.
struct Looked : torch::nn::Module {
  Looked(std::int64_t width, double phase, std::function<void()> look) : look(std::move(look)) {
    weight = register_parameter("weight", waves({width, width}, phase).mul(0.1));
    bias = register_parameter("bias", waves({width}, phase));
  }
  at::Tensor forward(const at::Tensor& x) {
    look();
    return at::tanh(at::linear(x, weight, bias));
  }
  std::function<void()> look;
  at::Tensor weight, bias;
};

TEST(FullyShard, AtMostTwoUnitsAreGathered) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    constexpr std::int64_t kWidth = 31;  // so that half a block is a whole number of rows
    std::vector<at::Tensor> weights;
    std::vector<std::ptrdiff_t> seen;
    const auto look = [&] { seen.push_back(std::ranges::count_if(weights, has_memory)); };
    torch::nn::Sequential net;
    for (int i = 0; i < 8; ++i) {
      const auto block = std::make_shared<Looked>(kWidth, i, look);
      weights.push_back(block->weight);
      net->push_back(block);
    }
    FullyShardedDataParallel sharded(*net, mesh_of(world));
    std::vector<GradReadySubscription> subscriptions;
    for (const auto& w : weights) subscriptions.push_back(on_grad_ready(w, [&](const at::Tensor&) { look(); }));
    look();
    EXPECT_THAT(seen, ElementsAre(0));
    for (int step = 0; step < 3; ++step) {
      seen.clear();
      net->forward(waves({4, kWidth}, step)).sum().backward();
      ASSERT_EQ(seen.size(), 16U);
      for (std::size_t i = 0; i < 7; ++i) EXPECT_EQ(seen[i], 2) << i;  // the unit in use and the prefetched one
      EXPECT_EQ(seen[7], 1);
      for (const auto count : seen) EXPECT_LE(count, 2);
      look();
      EXPECT_EQ(seen.back(), 0);
    }
    // Each rank keeps half, and has room for two units of parameters and two of gradients.
    const auto statistics = sharded.statistics();
    const std::int64_t unit = (kWidth * kWidth + kWidth) * 4;
    EXPECT_EQ(statistics.padding_bytes, 0);
    EXPECT_EQ(statistics.shard_bytes, 8 * unit / 2);
    EXPECT_EQ(statistics.sharded_grad_bytes, 8 * unit / 2);
    EXPECT_EQ(statistics.unsharded_bytes, 2 * unit);
    EXPECT_EQ(statistics.gradient_bytes, 2 * unit);
    EXPECT_EQ(statistics.synchronisations, 3);
    EXPECT_EQ(statistics.prefetches, 3 * (7 + 7));
    EXPECT_EQ(statistics.gathers, 3 * (8 + 7));  // the last block stays from the forward to the backward pass
  });
}

TEST(FullyShard, SmallNeighboursAreJoined) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    auto net = linears(5, 10);
    const FullyShardedDataParallel sharded(*net, mesh_of(world), {.smallest_unit = 200});
    const auto units = sharded.units();
    ASSERT_EQ(units.size(), 2U);  // 110 each: two, then three
    EXPECT_THAT(units[0], ElementsAre("0.weight", "0.bias", "2.weight", "2.bias"));
    EXPECT_EQ(units[1].size(), 6U);
    net->forward(waves({2, 10}, 1.0)).sum().backward();
  });
}

TEST(FullyShard, GradientsThatAreStillThereAreAddedTo) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for (const int stage : {1, 2, 3}) {
      auto net = linears(2, 6);
      FullyShardedDataParallel sharded(*net, mesh_of(world), {.stage = stage});
      const auto pass = [&] { net->forward(waves({3, 6}, world->rank())).sum().backward(); };
      pass();
      std::vector<at::Tensor> once;
      for (const auto& p : sharded.parameters()) once.push_back(p.tensor.grad().clone());
      pass();
      for (std::size_t i = 0; i < once.size(); ++i) {
        EXPECT_TRUE(at::equal(sharded.parameters()[i].tensor.grad(), once[i].mul(2))) << stage;
      }
    }
  });
}

TEST(FullyShard, FrozenParametersAreSharedButNotTrained) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    auto a = linears(3, 10), b = linears(3, 10);
    for (auto& net : {a, b}) {
      for (auto& p : net->named_parameters()) p.value().set_requires_grad(p.key().ends_with("bias"));
    }
    DistributedDataParallel ddp(*a, world);
    FullyShardedDataParallel sharded(*b, mesh_of(world));
    EXPECT_EQ(sharded.parameters().size(), 6U);
    EXPECT_EQ(sharded.trained_parameters().size(), 3U);
    for (int step = 0; step < 2; ++step) {
      Sgd(ddp.parameters()).zero_grad();
      Sgd(sharded.trained_parameters()).zero_grad();
      a->forward(waves({4, 10}, world->rank())).square().sum().backward();
      b->forward(waves({4, 10}, world->rank())).square().sum().backward();
    }
    for (const auto& p : sharded.trained_parameters()) {
      const auto found = std::ranges::find(ddp.parameters(), p.name, &NamedTensor::name);
      const Box box = p.shard->box();
      EXPECT_TRUE(at::equal(p.tensor.grad(), found->tensor.grad().narrow(0, box.offsets[0], box.shape[0]))) << p.name;
    }
  });
}

// The last unit's output is the whole module's, which is itself a unit. Its gradient does not mean that the last unit
// is done.
TEST(FullyShard, AFrozenUnitInsideTheRootStaysUntilItIsThrough) {
  struct Net : nn::Module {
    Net() : nn::Module("Net") {
      scale = make_parameter("scale", {6}, {}, Init::normal(1.0, 0.1));
      for (int i = 0; i < 3; ++i) {
        const auto layer = std::make_shared<nn::Linear>(nn::LinearOptions{6, 6, true});
        layers.push_back(register_module(std::to_string(i), layer));
      }
      nn::initialise(*this, 3);
      for (auto& p : layers.back()->parameters()) p.set_requires_grad(false);
    }
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor y = x * scale;
      for (const auto& layer : layers) y = call(layer, y);
      return y;
    }
    at::Tensor scale;
    std::vector<std::shared_ptr<nn::Linear>> layers;
  };
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    for (const bool prefetch : {true, false}) {
      Net plain, net;
      DistributedDataParallel ddp(plain, world);
      FullyShardedDataParallel sharded(net, mesh_of(world), {.prefetch = prefetch});
      const at::Tensor x = waves({4, 6}, world->rank());
      nn::call(plain, x).square().sum().backward();
      nn::call(net, x).square().sum().backward();
      for (const auto& p : sharded.trained_parameters()) {
        const auto found = std::ranges::find(ddp.parameters(), p.name, &NamedTensor::name);
        const Box box = p.shard->box();
        EXPECT_TRUE(at::equal(p.tensor.grad(), found->tensor.grad().narrow(0, box.offsets[0], box.shape[0]))) << p.name;
      }
    }
  });
}

TEST(FullyShard, AModelBornWithoutMemoryHasItsStartingValuesInShards) {
  run_local_ranks(3, [](const std::shared_ptr<Communicator>& world) {
    struct Net : nn::Module {
      explicit Net(bool without_memory) : nn::Module("Net") {
        weight = make_parameter("weight", {7, 5}, {.without_memory = without_memory});
      }
      at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
      at::Tensor weight;
    };
    Net whole_net(false), shell(true);
    nn::initialise(whole_net, 5);
    EXPECT_FALSE(has_memory(shell.weight));
    FullyShardedDataParallel sharded(shell, mesh_of(world));
    sharded.initialise(5);
    EXPECT_TRUE(at::equal(whole(sharded.parameters(), *world)[0].tensor, whole_net.weight));
    const at::Tensor x = waves({2, 5}, 0);
    EXPECT_TRUE(at::equal(nn::call(shell, x), whole_net.forward(x)));
  });
}

TEST(FullyShard, WhatCannotBeShardedIsRefused) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    ddp_testing::Bag scalar, mixed, integers, empty;
    scalar.add("s", at::zeros({}));
    mixed.add("a", at::zeros({2}));
    mixed.add("b", at::zeros({2}, at::kDouble));
    integers.add("i", at::zeros({2}, at::kLong), /*requires_grad=*/false);
    const auto refusal = [&](torch::nn::Module& module) {
      return message_of([&] { FullyShardedDataParallel(module, mesh_of(world)); });
    };
    EXPECT_THAT(refusal(scalar), AllOf(HasSubstr("'s' has no dimensions"), HasSubstr("shape [1]")));
    EXPECT_THAT(refusal(mixed), AllOf(HasSubstr("'a' (Float on cpu)"), HasSubstr("'b' (Double on cpu)")));
    EXPECT_THAT(refusal(integers), HasSubstr("'i' has dtype Long"));
    EXPECT_THAT(refusal(empty), HasSubstr("no parameters"));
    auto net = linears(1, 4);
    EXPECT_THAT(message_of([&] {
                  FullyShardedDataParallel(*net, DeviceMesh(world, {{"dp", 2}}));
                }),
                HasSubstr("has no axis 'dp_shard'"));
    EXPECT_THAT(message_of([&] { FullyShardedDataParallel(*net, mesh_of(world), {.stage = 4}); }),
                HasSubstr("stage is 4: expected 1, 2 or 3"));
    auto other = linears(1, world->rank() == 0 ? 4 : 5);
    EXPECT_THAT(refusal(*other), HasSubstr("the ranks hold different models"));
  });
}

TEST(FullyShard, AnUnusedParameterIsNamedOnEveryRank) {
  std::vector<std::string> messages(2);
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    auto net = linears(3, 6);
    FullyShardedDataParallel sharded(*net, mesh_of(world));
    // The last block is not run on rank 1.
    at::Tensor x = waves({2, 6}, 1.0);
    const int count = world->rank() == 1 ? 4 : 6;
    messages[static_cast<std::size_t>(world->rank())] = message_of([&] {
      for (int i = 0; i < count; ++i) x = (*(net->begin() + i)).forward<at::Tensor>(x);
      x.sum().backward();
    });
  });
  EXPECT_THAT(messages[1], AnyOf(HasSubstr("'4.weight'"), HasSubstr("unit"), HasSubstr("rank")));
  EXPECT_NE(messages[0], "");
}

TEST(FullyShard, AnExceptionInBackwardEndsTheOtherRanksToo) {
  std::vector<std::string> messages(2);
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    auto net = linears(3, 6);
    FullyShardedDataParallel sharded(*net, mesh_of(world));
    at::Tensor x = waves({2, 6}, 1.0).requires_grad_();
    if (world->rank() == 1) {
      x.register_hook([](const at::Tensor&) { throw Error("the hook of rank 1"); });
    }
    messages[static_cast<std::size_t>(world->rank())] = message_of([&] {
      net->forward(x).sum().backward();
      net->forward(x).sum().backward();
    });
  });
  EXPECT_THAT(messages[1], HasSubstr("the hook of rank 1"));
  EXPECT_THAT(messages[0], HasSubstr("ended with an error"));
}

TEST(FullyShard, AModuleThatIsNotRunThroughItIsAnError) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Mlp net;
    FullyShardedDataParallel sharded(net, mesh_of(world));
    EXPECT_THAT(message_of([&] {
                  net.forward(waves({6, 8}, 0)).sum().backward();
                }),
                AnyOf(HasSubstr("without having been gathered"), HasSubstr("ended with an error")));
  });
}

}  // namespace
}  // namespace phalanx
