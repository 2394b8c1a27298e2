// FullyShardOptions::gather_on_use: forward passes that know nothing of sharding. And what such a pass says without it.
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"

namespace phalanx {
namespace {

using ddp_testing::message_of;
using ddp_testing::Mlp;
using ddp_testing::waves;
using fully_shard_testing::expect_equal;
using fully_shard_testing::expect_trains_as_ddp;
using fully_shard_testing::kShardedSteps;
using fully_shard_testing::kWidth;
using fully_shard_testing::sharding_mesh;
using fully_shard_testing::whole;

/// A residual block whose parts are called by forward().
struct Residual : torch::nn::Module {
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(kWidth, 2 * kWidth));
  torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(2 * kWidth, kWidth));
  at::Tensor forward(const at::Tensor& x) { return x + fc2->forward(at::tanh(fc1->forward(norm->forward(x)))); }
};

constexpr int kBlockCount = 3;
constexpr std::size_t kUnits = kBlockCount + 3;  // first, the blocks, head, and what the net itself has

/// Children by forward(), a list of blocks, and two parameters by hand: one as a view, one in a list of tensors.
struct Net : torch::nn::Module {
  Net() {
    for (int i = 0; i < kBlockCount; ++i) blocks->push_back(std::make_shared<Residual>());
    nn::initialise(*this, 4);
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor turned = w.t();  // read again behind all blocks
    at::Tensor x = at::tanh(first->forward(at::matmul(input, w)));
    for (const auto& block : *blocks) {
      auto& one = static_cast<Residual&>(*block);
      x = recomputes ? checkpoint([&one](const at::Tensor& in) { return one.forward(in); }, x) : one.forward(x);
    }
    x = at::matmul(x, turned) + at::cat({scale, scale});
    return head->forward(x);
  }
  at::Tensor w = register_parameter("w", waves({kWidth, kWidth}, 0.2).mul(0.3));
  at::Tensor scale = register_parameter("scale", waves({kWidth / 2}, 0.4));
  torch::nn::Linear first = register_module("first", torch::nn::Linear(kWidth, kWidth));
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
  torch::nn::Linear head = register_module("head", torch::nn::Linear(kWidth, kWidth));
  bool recomputes = false;
};

const auto kForward = [](auto& net, const at::Tensor& x, auto*) { return net.forward(x); };

/// Options with gather_on_use.
FullyShardOptions on_use(FullyShardOptions options = {}) {
  options.gather_on_use = true;
  return options;
}

TEST(GatherOnUse, AnUntouchedForwardTrainsAsUnderDataParallelism) {
  for (const int ranks : {1, 2, 3}) {
    for (const FullyShardOptions& options :
         {FullyShardOptions{.stage = 3}, FullyShardOptions{.stage = 2}, FullyShardOptions{.stage = 1},
          FullyShardOptions{.reshard_after_forward = false}, FullyShardOptions{.prefetch = false},
          FullyShardOptions{.offload = true}}) {
      for (const bool recomputes : {false, true}) {
        run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
          SCOPED_TRACE(::testing::Message()
                       << ranks << " ranks, stage " << options.stage << ", recomputes " << recomputes);
          Net a, b;
          b.recomputes = recomputes;
          expect_trains_as_ddp(world, a, b, kWidth, kUnits, kForward, on_use(options));
        });
      }
    }
  }
}

TEST(GatherOnUse, MicroBatchesReplicasAndGroupsTrainAsUnderDataParallelism) {
  struct Case {
    int ranks, replicas, group, micro_batches;
  };
  for (const auto& [ranks, replicas, group, micro_batches] : {Case{2, 1, 0, 3}, Case{4, 2, 0, 2}, Case{4, 1, 2, 2}}) {
    for (const bool recomputes : {false, true}) {
      run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << replicas << " replicas, groups of " << group);
        Net a, b;
        b.recomputes = recomputes;
        expect_trains_as_ddp(world, a, b, kWidth, kUnits, kForward, on_use({.reshard_group = group}),
                             {.replicas = replicas, .micro_batches = micro_batches});
      });
    }
  }
}

/// Steps of a sharded net, of which every rank sees the same batch. The shards at the end, put together.
template <class Step>
std::vector<NamedTensor> trained(const std::shared_ptr<Communicator>& world, Net& net, const FullyShardOptions& options,
                                 const Step& step) {
  FullyShardedDataParallel sharded(net, sharding_mesh(world), options);
  Sgd optimizer(sharded.parameters(), {.momentum = 0.9});
  for (int i = 0; i < kShardedSteps; ++i) {
    step(net, sharded, i);
    optimizer.step(0.1);
    optimizer.zero_grad();
  }
  return whole(sharded.parameters(), *world);
}

// Gathered, used and averaged in bfloat16. Equal batches have equal gradients, so their average has the same bits.
TEST(GatherOnUse, SixteenBitsAndAccumulationHaveTheBitsOfOneRank) {
  const FullyShardOptions bf16 = on_use({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
  const auto step = [](Net& net, FullyShardedDataParallel& sharded, int i) {
    for (int part = 0; part < 2; ++part) {
      std::optional<FullyShardedDataParallel::NoAllReduce> more;
      if (part == 0) more.emplace(sharded.no_all_reduce());
      const at::Tensor loss = sharded.run(net, waves({4, kWidth}, 0.3 * i + part)).square().mean();
      EXPECT_EQ(loss.scalar_type(), at::kBFloat16);
      loss.backward();
    }
  };
  std::vector<NamedTensor> alone;
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    Net net;
    alone = trained(world, net, bf16, step);
  });
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    for (const bool recomputes : {false, true}) {
      Net net;
      net.recomputes = recomputes;
      expect_equal(trained(world, net, bf16, step), alone);
    }
  });
}

TEST(GatherOnUse, OnlyTheUnitInUseAndTheNextHaveMemory) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Net net;
    FullyShardedDataParallel sharded(net, sharding_mesh(world), on_use());
    const auto units = sharded.units();
    EXPECT_THAT(units[0], ElementsAre("w", "scale"));
    EXPECT_THAT(units[1], ElementsAre("first.weight", "first.bias"));
    EXPECT_THAT(units[2], ElementsAre("blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.fc1.weight",
                                      "blocks.0.fc1.bias", "blocks.0.fc2.weight", "blocks.0.fc2.bias"));
    const auto gathered = [&] {
      int count = has_memory(net.first->weight) + has_memory(net.head->weight);
      for (const auto& block : *net.blocks) count += has_memory(static_cast<Residual&>(*block).fc1->weight);
      return count;
    };
    for (int step = 0; step < 3; ++step) {
      const at::Tensor out = net.forward(waves({5, kWidth}, step));
      EXPECT_LE(gathered(), 2);
      out.sum().backward();
      EXPECT_EQ(gathered(), 0);
    }
    EXPECT_GT(sharded.statistics().prefetches, 0);
    const std::int64_t block = (2 * kWidth + 4 * kWidth * kWidth + 3 * kWidth) * 4;
    EXPECT_LE(sharded.statistics().unsharded_bytes, 2 * (block + 256));
  });
}

// An evaluation between steps, and one after the optimizer, see the parameters of their time.
TEST(GatherOnUse, EvaluationSeesTheValuesOfItsTime) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Net plain, net;
    DistributedDataParallel ddp(plain, world);
    FullyShardedDataParallel sharded(net, sharding_mesh(world), on_use());
    Sgd first(ddp.parameters()), second(sharded.parameters());
    const auto compare = [&](double phase) {
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(net.forward(waves({3, kWidth}, phase)), plain.forward(waves({3, kWidth}, phase))));
    };
    for (int step = 0; step < 3; ++step) {
      compare(step);
      compare(step + 0.5);
      plain.forward(waves({3, kWidth}, step)).sum().backward();
      net.forward(waves({3, kWidth}, step)).sum().backward();
      first.step(0.1);
      second.step(0.1);
      compare(step);
      first.zero_grad();
      second.zero_grad();
    }
  });
}

TEST(GatherOnUse, OneOperatorMayReadSeveralUnits) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const auto stacked = [](auto& net, const at::Tensor& x, auto*) {
      std::vector<at::Tensor> weights;
      for (const auto& block : *net.blocks) weights.push_back(static_cast<Residual&>(*block).fc1->weight);
      return net.forward(x) + at::stack(weights).square().mean();
    };
    Net a, b;
    expect_trains_as_ddp(world, a, b, kWidth, kUnits, stacked, on_use());
  });
}

/// Layers of Phalanx, run by nn::call(), between plain ones, run by forward().
struct Mixed : torch::nn::Module {
  Mixed() {
    for (int i = 0; i < kBlockCount; ++i) {
      ours->push_back(std::make_shared<nn::Linear>(nn::LinearOptions{kWidth, kWidth, true}));
      plain->push_back(torch::nn::Linear(kWidth, kWidth));
    }
    nn::initialise(*this, 6);
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < ours->size(); ++i) {
      x = at::tanh(nn::call(std::static_pointer_cast<nn::Linear>(ours->ptr(i)), x));
      x = at::tanh(static_cast<torch::nn::LinearImpl&>(*plain[i]).forward(x));
    }
    return x;
  }
  torch::nn::ModuleList ours = register_module("ours", torch::nn::ModuleList());
  torch::nn::ModuleList plain = register_module("plain", torch::nn::ModuleList());
};

TEST(GatherOnUse, UnitsWithHooksStandBesideThoseWithout) {
  for (const int stage : {1, 3}) {
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      Mixed a, b;
      const auto statistics =
          expect_trains_as_ddp(world, a, b, kWidth, 2 * kBlockCount, kForward, on_use({.stage = stage}));
      const std::int64_t unit = (kWidth * kWidth + kWidth + 64) * 4;
      EXPECT_LE(statistics.unsharded_bytes, stage == 3 ? 2 * unit : 0);
    });
  }
}

TEST(GatherOnUse, SmallUnitsAreJoined) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Net a, b;
    expect_trains_as_ddp(world, a, b, kWidth, 2, kForward, on_use({.smallest_unit = 1 << 20}));
  });
}

// A read between the backward pass and the optimizer's step begins no forward pass with the old values.
TEST(GatherOnUse, AReadBeforeTheStepLeavesNothingOutOfDate) {
  const std::vector<std::function<at::Tensor(Net&)>> reads{
      [](Net& net) { return net.w; }, [](Net& net) { return static_cast<Residual&>(*net.blocks[1]).fc1->weight; },
      [](Net& net) { return net.head->weight; }};
  for (const int stage : {1, 2, 3}) {
    for (const auto& read : reads) {
      run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
        Net plain, net;
        DistributedDataParallel ddp(plain, world);
        FullyShardedDataParallel sharded(net, sharding_mesh(world), on_use({.stage = stage}));
        Sgd first(ddp.parameters()), second(sharded.parameters());
        for (int step = 0; step < 3; ++step) {
          const at::Tensor x = waves({3, kWidth}, step);
          const at::Tensor expected = plain.forward(x), found = net.forward(x);
          ASSERT_TRUE(at::equal(found, expected)) << "stage " << stage << ", step " << step;
          expected.sum().backward();
          found.sum().backward();
          EXPECT_GT(read(net).norm().item<double>(), 0);
          first.step(0.1);
          second.step(0.1);
          first.zero_grad();
          second.zero_grad();
        }
      });
    }
  }
}

TEST(GatherOnUse, ANetOfOneUnitMayBeEvaluatedFirst) {
  struct One : torch::nn::Module {
    torch::nn::Linear layer = register_module("layer", torch::nn::Linear(kWidth, kWidth));
    at::Tensor forward(const at::Tensor& x) { return layer->forward(x); }
  };
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    One plain, net;
    nn::initialise(plain, 3);
    nn::initialise(net, 3);
    DistributedDataParallel ddp(plain, world);
    FullyShardedDataParallel sharded(net, sharding_mesh(world), on_use());
    Sgd first(ddp.parameters()), second(sharded.parameters());
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = waves({3, kWidth}, step);
      {
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(net.forward(x), plain.forward(x))) << step;
      }
      plain.forward(x).sum().backward();
      net.forward(x).sum().backward();
      first.step(0.1);
      second.step(0.1);
      first.zero_grad();
      second.zero_grad();
    }
  });
}

/// A module with a parameter of its own around a list and a layer, and one whose list has one large member.
struct Encoder : torch::nn::Module {
  Encoder() {
    for (int i = 0; i < kBlockCount; ++i) blocks->push_back(std::make_shared<Residual>());
  }
  at::Tensor forward(at::Tensor x) {
    x = x + position;
    for (const auto& block : *blocks) x = static_cast<Residual&>(*block).forward(x);
    return last->forward(x) * position;
  }
  at::Tensor position = register_parameter("position", at::zeros({kWidth}));
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
  torch::nn::Linear last = register_module("last", torch::nn::Linear(kWidth, kWidth));
};
struct Encoded : torch::nn::Module {
  Encoded() { nn::initialise(*this, 8); }
  at::Tensor forward(const at::Tensor& x) { return head->forward(encoder->forward(x)); }
  std::shared_ptr<Encoder> encoder = register_module("encoder", std::make_shared<Encoder>());
  torch::nn::Linear head = register_module("head", torch::nn::Linear(kWidth, kWidth));
};

TEST(GatherOnUse, AModuleWithAParameterOfItsOwnLeavesItsChildrenTheirUnits) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Encoded a, b;
    expect_trains_as_ddp(world, a, b, kWidth, kBlockCount + 3, kForward, on_use());
    Encoded net;
    FullyShardedDataParallel sharded(net, sharding_mesh(world), on_use());
    const auto units = sharded.units();
    EXPECT_THAT(units.front(), ElementsAre("encoder.position"));
    EXPECT_THAT(units[kBlockCount + 1], ElementsAre("encoder.last.weight", "encoder.last.bias"));
  });
}

TEST(GatherOnUse, AUnitOfMoreThanHalfOfAllParametersIsNamedOnce) {
  struct Nested : torch::nn::Module {
    Nested() { list->push_back(std::make_shared<Encoder>()); }
    torch::nn::ModuleList list = register_module("list", torch::nn::ModuleList());
    torch::nn::Linear head = register_module("head", torch::nn::Linear(kWidth, kWidth));
  };
  const auto warnings_of = [](const auto& make) {
    ::testing::internal::CaptureStderr();
    run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      const auto net = make();
      FullyShardedDataParallel(*net, sharding_mesh(world), on_use());
    });
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(warnings_of([] { return std::make_shared<Encoded>(); }), "");
  const std::string text = warnings_of([] { return std::make_shared<Nested>(); });
  EXPECT_THAT(text, HasSubstr("unit 'list.0' holds 9"));
  EXPECT_EQ(text.find("fully_shard: unit"), text.rfind("fully_shard: unit")) << text;
}

TEST(GatherOnUse, WhatNeedsNoValuesGathersNothing) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Net net;
    FullyShardedDataParallel sharded(net, sharding_mesh(world), on_use());
    const at::Tensor weight = net.head->weight;
    // One rank alone: a gather would wait for the other for ever.
    if (world->rank() == 0) {
      const std::int64_t before = sharded.statistics().gathers;
      EXPECT_EQ(at::zeros_like(weight).sum().item<float>(), 0);
      EXPECT_EQ(at::ones_like(weight).sizes(), weight.sizes());
      EXPECT_EQ(at::empty_like(weight).sizes(), weight.sizes());
      EXPECT_EQ(at::randn_like(weight).scalar_type(), weight.scalar_type());
      EXPECT_EQ(weight.new_zeros({3}).sum().item<float>(), 0);
      EXPECT_EQ(sharded.statistics().gathers, before);
    }
    world->barrier();
  });
}

TEST(GatherOnUse, TheDispatchKeyIsTakenOnceAndOnlyByOne) {
  const auto take = [] {
    return c10::Dispatcher::singleton().registerFallback(c10::DispatchKey::TESTING_ONLY_GenericWrapper,
                                                         c10::KernelFunction::makeFallthrough(), "the test");
  };
  const auto shard = [] {
    run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
      Net net;
      FullyShardedDataParallel(net, sharding_mesh(world), on_use());
    });
  };
  // A process in which other code was first.
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const auto taken = take();
        std::fputs(message_of(shard).c_str(), stderr);
        std::exit(3);
      },
      ::testing::ExitedWithCode(3), "other code of this process uses libtorch's dispatch key");
  shard();
  shard();  // another net of the same process
  EXPECT_THROW(take(), c10::Error);
}

TEST(GatherOnUse, WritesToParametersAreErrors) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Net net;
    FullyShardedDataParallel sharded(net, sharding_mesh(world), on_use());
    const at::NoGradGuard no_grad;
    EXPECT_THAT(message_of([&] { net.head->weight.clamp_(-1, 1); }),
                AllOf(HasSubstr("aten::clamp_ writes to a parameter of a sharded module"),
                      HasSubstr("FullyShardedDataParallel::parameters()")));
  });
}

TEST(GatherOnUse, ModulesOfPhalanxInsidePlainUnitsAreRefused) {
  struct Block : torch::nn::Module {
    std::shared_ptr<nn::Linear> ours =
        register_module("ours", std::make_shared<nn::Linear>(nn::LinearOptions{kWidth, kWidth, true}));
  };
  struct Blocks : torch::nn::Module {
    torch::nn::ModuleList list = register_module("list", torch::nn::ModuleList());
  };
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Blocks net;
    net.list->push_back(std::make_shared<Block>());
    EXPECT_THAT(message_of([&] { FullyShardedDataParallel(net, sharding_mesh(world), on_use()); }),
                HasSubstr("0.ours is a phalanx::nn::Module inside the plain module 0"));
  });
}

// Without gather_on_use.

TEST(GatherOnUse, WithoutItAnUntouchedForwardIsAnErrorThatSaysWhatToDo) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Mlp net;
    FullyShardedDataParallel sharded(net, sharding_mesh(world));
    const auto says = AllOf(HasSubstr("unit (root) ('w0', ...) is read without having been gathered"),
                            HasSubstr("FullyShardedDataParallel::run()"), HasSubstr("gather_on_use"));
    EXPECT_THAT(message_of([&] { net.forward(waves({6, 8}, 0)); }), says);
    const at::NoGradGuard no_grad;
    EXPECT_THAT(message_of([&] { net.forward(waves({6, 8}, 0)); }), says);
    EXPECT_TRUE(sharded.run(net, waves({6, 8}, 0)).defined());
  });
}

TEST(GatherOnUse, AForwardOfAPhalanxModuleThatCallDoesNotRunIsAnErrorThatSaysWhatToDo) {
  struct Layers : torch::nn::Module {
    torch::nn::ModuleList list = register_module("list", torch::nn::ModuleList());
  };
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const auto layers = std::make_shared<Layers>();
    for (int i = 0; i < 3; ++i) layers->list->push_back(std::make_shared<nn::Linear>(nn::LinearOptions{8, 8, true}));
    nn::initialise(*layers, 1);
    FullyShardedDataParallel sharded(*layers, sharding_mesh(world));
    const auto layer = std::static_pointer_cast<nn::Linear>(layers->list->ptr(1));
    std::string message;
    try {
      layer->forward(waves({2, 8}, 0));
    } catch (const std::exception& error) {
      message = error.what();
    }
    EXPECT_THAT(message, AllOf(HasSubstr("unit list.1 ('list.1.weight', ...) is read while it is sharded"),
                               HasSubstr("nn::call()")));
    EXPECT_TRUE(nn::call(layer, waves({2, 8}, 0)).defined());
  });
}

TEST(GatherOnUse, APipelineRefusesIt) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    Net net;
    const FullyShardedDataParallel sharded(net, sharding_mesh(world), on_use());
    EXPECT_THAT(message_of([&] { sharded.in_pipeline(); }), HasSubstr("leave out gather_on_use"));
  });
}

}  // namespace
}  // namespace phalanx
