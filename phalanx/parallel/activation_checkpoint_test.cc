#include "phalanx/parallel/activation_checkpoint.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/causal_attention.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/testing/ddp_test_support.h"

namespace phalanx {
namespace {

using ddp_testing::message_of;
using ddp_testing::waves;

// Counts its runs, and refers to its inner tensor without owning it.
struct Block : nn::Module {
  explicit Block(double phase) : nn::Module("Block") {
    first = register_module("first", std::make_shared<nn::Linear>(nn::LinearOptions{6, 12, true}));
    second = register_module("second", std::make_shared<nn::Linear>(nn::LinearOptions{12, 6}));
    const at::NoGradGuard no_grad;
    for (auto& p : parameters()) p.copy_(waves(p.sizes(), phase).mul(0.4));
  }
  at::Tensor forward(const at::Tensor& x, double scale) {
    ++runs;
    const at::Tensor inner = at::tanh(nn::call(first, x)).mul(scale);
    last_inner = c10::weak_intrusive_ptr<c10::TensorImpl>(inner.getIntrusivePtr());
    return nn::call(second, inner.square());
  }
  std::shared_ptr<nn::Linear> first, second;
  int runs = 0;
  c10::weak_intrusive_ptr<c10::TensorImpl> last_inner{c10::intrusive_ptr<c10::TensorImpl>()};
};

struct Net : nn::Module {
  explicit Net(bool checkpointed) : nn::Module("Net") {
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module(std::to_string(i), std::make_shared<Block>(i)));
      if (checkpointed) checkpoint_activations(*blocks.back());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = nn::call(block, x, 1.5);
    return x;
  }
  std::vector<std::shared_ptr<Block>> blocks;
};

std::vector<at::Tensor> grads_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> grads;
  for (const auto& p : module.parameters()) grads.push_back(p.grad());
  return grads;
}

void expect_same_grads(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto first = grads_of(a), second = grads_of(b);
  ASSERT_EQ(first.size(), second.size());
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i], second[i])) << i;
}

// It would run without being checkpointed.
TEST(ActivationCheckpoint, AnInputThatCannotBeKeptIsAnErrorWhileGradientsAreRecorded) {
  struct Counts : nn::Module {
    Counts() : nn::Module("Counts") {}
    at::Tensor forward(const at::Tensor& x, int& calls) {
      ++calls;
      return x * 2;
    }
  };
  Counts counts;
  checkpoint_activations(counts);
  int calls = 0;
  const at::Tensor x = at::ones({2}).requires_grad_();
  EXPECT_THAT(message_of([&] { nn::call(counts, x, calls); }), ::testing::HasSubstr("Counts is checkpointed"));
  const at::NoGradGuard no_grad;
  nn::call(counts, x, calls);
  EXPECT_EQ(calls, 1);
}

TEST(ActivationCheckpoint, TheBitsAreThoseWithoutIt) {
  Net plain(false), checkpointed(true);
  for (const bool input_needs_grad : {true, false}) {
    const at::Tensor a = waves({5, 6}, 0.0).set_requires_grad(input_needs_grad);
    const at::Tensor b = waves({5, 6}, 0.0).set_requires_grad(input_needs_grad);
    const at::Tensor y = plain.forward(a), z = checkpointed.forward(b);
    EXPECT_TRUE(at::equal(y, z));
    y.square().sum().backward();
    z.square().sum().backward();
    expect_same_grads(plain, checkpointed);
    EXPECT_TRUE(!input_needs_grad || at::equal(a.grad(), b.grad()));
  }
}

TEST(ActivationCheckpoint, KeepsNothingInBetweenAndRunsTwice) {
  Net plain(false), checkpointed(true);
  const at::Tensor x = waves({5, 6}, 0.0);
  const at::Tensor y = plain.forward(x), z = checkpointed.forward(x);
  for (const auto& block : plain.blocks) EXPECT_FALSE(block->last_inner.expired());
  for (const auto& block : checkpointed.blocks) EXPECT_TRUE(block->last_inner.expired());
  z.sum().backward();
  for (const auto& block : plain.blocks) EXPECT_EQ(block->runs, 1);
  for (const auto& block : checkpointed.blocks) EXPECT_EQ(block->runs, 2);
  const at::NoGradGuard no_grad;
  checkpointed.forward(x);
  for (const auto& block : checkpointed.blocks) EXPECT_EQ(block->runs, 3);
}

TEST(SelectiveCheckpoint, TheBitsAreThoseWithoutIt) {
  for (const bool sharded : {false, true}) {
    run_local_ranks(sharded ? 2 : 1, [&](const std::shared_ptr<Communicator>& world) {
      Net plain(false), selective(false);
      for (const auto& block : selective.blocks) checkpoint_activations(*block, op_sac_policy);
      std::unique_ptr<DistributedDataParallel> ddp;
      if (sharded)
        ddp = std::make_unique<DistributedDataParallel>(selective, world);  // linear layers have buffers then
      for (int pass = 0; pass < 2; ++pass) {
        for (auto* net : {&plain, &selective}) {
          for (auto& p : net->parameters()) p.mutable_grad().reset();
        }
        const at::Tensor x = waves({5, 6}, pass);
        const at::Tensor y = plain.forward(x), z = selective.forward(x);
        EXPECT_TRUE(at::equal(y, z));
        y.square().sum().backward();
        z.square().sum().backward();
        expect_same_grads(plain, selective);
      }
    });
  }
}

// In float32, under autocast, and entirely in 16 bits.
struct Arithmetic {
  at::ScalarType weights = at::kFloat;
  kernels::AutocastState autocast = {};
};
const std::vector<Arithmetic> kArithmetics = {
    {}, {at::kFloat, {true, at::kBFloat16}}, {at::kFloat, {true, at::kHalf}}, {at::kBFloat16, {}}, {at::kHalf, {}}};

TEST(SelectiveCheckpoint, KeptLayersAreNotComputedAgain) {
  for (const Arithmetic& arithmetic : kArithmetics) {
    SCOPED_TRACE(fmt::format("{}, autocast {} to {}", c10::toString(arithmetic.weights), arithmetic.autocast.enabled,
                             c10::toString(arithmetic.autocast.dtype)));
    Net net(false);
    net.to(arithmetic.weights);
    const auto& block = net.blocks[0];
    checkpoint_activations(*block,
                           [](kernels::SavedOp op, int nth) { return op == kernels::SavedOp::linear && nth == 0; });
    const at::Tensor x = waves({5, 6}, 0.0).to(arithmetic.weights);
    const auto run = [&] {
      const kernels::AutocastScope scope(at::kCPU, arithmetic.autocast);
      return nn::call(block, x, 1.0);
    };
    run().sum().backward();
    const at::Tensor expected = block->second->weight.grad().clone();
    EXPECT_GT(expected.abs().sum().item<float>(), 0);
    for (auto& p : net.parameters()) p.mutable_grad().reset();
    // The second layer's weight gradient is computed from the first one's saved output, which is that of the forward
    // pass even if the weights have changed since. Its own output is recomputed.
    const at::Tensor y = run();
    {
      const at::NoGradGuard no_grad;
      block->first->weight.data().zero_();
    }
    y.sum().backward();
    EXPECT_TRUE(at::equal(block->second->weight.grad(), expected));
    EXPECT_EQ(block->runs, 4);
  }
}

TEST(SelectiveCheckpoint, KeptAttentionIsNotComputedAgain) {
  const auto test = [](const Arithmetic& arithmetic, std::int64_t window) {
    SCOPED_TRACE(fmt::format("{}, autocast {} to {}, window {}", c10::toString(arithmetic.weights),
                             arithmetic.autocast.enabled, c10::toString(arithmetic.autocast.dtype), window));
    const at::Tensor scale = at::ones({}, at::TensorOptions(arithmetic.weights)).set_requires_grad(true);
    const at::Tensor factor = at::ones({}, at::TensorOptions(arithmetic.weights)).set_requires_grad(true);
    const at::Tensor x = waves({1, 2, 16, 8}, 0.0).to(arithmetic.weights);
    const auto run = [&] {
      const kernels::AutocastScope scope(at::kCPU, arithmetic.autocast);
      const auto layer = [&](const at::Tensor& input) {
        const at::Tensor q = input * scale;
        return kernels::causal_attention(q, q, q, window) * factor;
      };
      return checkpoint(layer, x, [](kernels::SavedOp op, int) { return op == kernels::SavedOp::attention; });
    };
    run().square().sum().backward();
    const at::Tensor expected = factor.grad().clone();
    EXPECT_GT(expected.item<float>(), 0);
    factor.mutable_grad().reset();
    const at::Tensor y = run().square().sum();
    scale.data().zero_();  // recomputed attention would give only zeros
    y.backward();
    EXPECT_TRUE(at::equal(factor.grad(), expected));
  };
  for (const Arithmetic& arithmetic : kArithmetics) {
    for (const std::int64_t window : {0, 3}) test(arithmetic, window);
  }
}

TEST(SelectiveCheckpoint, AnInnerCheckpointKeepsForItself) {
  const at::Tensor w = waves({4, 4}, 1.0).requires_grad_(), v = waves({4, 4}, 1.0).requires_grad_();
  const auto layers = [](const at::Tensor& w, bool inner) {
    return [w, inner](const at::Tensor& x) {
      const auto one = [w](const at::Tensor& x) { return at::tanh(kernels::linear(x, w)); };
      return one(inner ? checkpoint(one, one(x)) : one(one(x)));
    };
  };
  const at::Tensor x = waves({3, 4}, 0.0);
  checkpoint(layers(w, false), x).sum().backward();
  checkpoint(layers(v, true), x, op_sac_policy).sum().backward();
  EXPECT_TRUE(at::allclose(w.grad(), v.grad(), 1e-6, 1e-7));
}

TEST(SelectiveCheckpoint, AnInnerCheckpointDoesNotCountInTheLayerAroundIt) {
  // The outer layer's first linear, which is saved, comes behind the inner checkpoint's.
  const at::Tensor w = waves({4, 4}, 1.0).requires_grad_(), v = waves({4, 4}, 1.0).requires_grad_();
  const auto one = [](const at::Tensor& w) {
    return [w](const at::Tensor& x) { return at::tanh(kernels::linear(x, w)); };
  };
  for (const kernels::CheckpointPolicy& inner :
       {kernels::CheckpointPolicy(nullptr), kernels::CheckpointPolicy(op_sac_policy)}) {
    w.mutable_grad().reset();
    v.mutable_grad().reset();
    const at::Tensor x = waves({3, 4}, 0.0);
    one(w)(one(w)(x)).sum().backward();
    checkpoint([&](const at::Tensor& y) { return one(v)(checkpoint(one(v), y, inner)); }, x, op_sac_policy)
        .sum()
        .backward();
    EXPECT_TRUE(at::allclose(w.grad(), v.grad(), 1e-6, 1e-7));
  }
}

TEST(SelectiveCheckpoint, AModuleInsideIsCheckpointedForItself) {
  Net plain(false), nested(false);
  for (const auto& block : nested.blocks) {
    checkpoint_activations(*block, [](kernels::SavedOp, int nth) { return nth == 0; });
    checkpoint_activations(*block->first);
  }
  const at::Tensor x = waves({5, 6}, 0.0);
  plain.forward(x).square().sum().backward();
  nested.forward(x).square().sum().backward();
  expect_same_grads(plain, nested);
}

TEST(SelectiveCheckpoint, FrozenWeightsGetNoGradient) {
  Net plain(false), frozen(false);
  for (auto* net : {&plain, &frozen}) {
    for (const auto& block : net->blocks) block->first->weight.set_requires_grad(false);
  }
  for (const auto& block : frozen.blocks) checkpoint_activations(*block, op_sac_policy);
  for (auto* net : {&plain, &frozen}) net->forward(waves({5, 6}, 0.0)).square().sum().backward();
  for (std::size_t i = 0; i < plain.blocks.size(); ++i) {
    EXPECT_FALSE(frozen.blocks[i]->first->weight.grad().defined());
    EXPECT_TRUE(at::equal(frozen.blocks[i]->second->weight.grad(), plain.blocks[i]->second->weight.grad()));
    EXPECT_TRUE(at::equal(frozen.blocks[i]->first->bias.grad(), plain.blocks[i]->first->bias.grad()));
  }
}

TEST(SelectiveCheckpoint, AnotherSequenceOfOperationsIsAnError) {
  const at::Tensor w = waves({4, 4}, 1.0).requires_grad_();
  int runs = 0;
  const at::Tensor y =
      checkpoint([&](const at::Tensor& x) { return runs++ == 0 ? x.mul(w.sum()) : kernels::linear(x, w); },
                 waves({3, 4}, 0.0), op_sac_policy);
  EXPECT_THAT(message_of([&] { y.sum().backward(); }), HasSubstr("other operations when it was run again"));
}

TEST(ActivationCheckpoint, ForwardHooksSeeEveryRun) {
  Net net(true);
  int before = 0;
  net.blocks[1]->add_pre_forward_hook([&](nn::Module&) { ++before; });
  net.forward(waves({2, 6}, 0.0)).sum().backward();
  EXPECT_EQ(before, 2);
}

TEST(ActivationCheckpoint, AnyFunctionAndNested) {
  const at::Tensor w = waves({4, 4}, 1.0).requires_grad_(), v = waves({4, 4}, 1.0).requires_grad_();
  const auto inner = [](const at::Tensor& w) {
    return [w](const at::Tensor& x) { return at::tanh(at::linear(x, w)); };
  };
  const at::Tensor x = waves({3, 4}, 0.0);
  inner(w)(inner(w)(x)).sum().backward();
  checkpoint([&](const at::Tensor& y) { return checkpoint(inner(v), checkpoint(inner(v), y)); }, x).sum().backward();
  EXPECT_TRUE(at::allclose(w.grad(), v.grad(), 1e-6, 1e-7));  // two contributions, added in another order
}

TEST(ActivationCheckpoint, UnderDataParallelismAndSharding) {
  for (const int ranks : {1, 2, 3}) {
    run_local_ranks(ranks, [](const std::shared_ptr<Communicator>& world) {
      Net plain(false), replicated(true), whole(true);
      DistributedDataParallel first(plain, world), second(replicated, world);
      FullyShardedDataParallel sharded(whole, DeviceMesh(world, {{"dp_shard", world->size()}}));
      for (int step = 0; step < 2; ++step) {
        const at::Tensor x = waves({4, 6}, world->rank() + step);
        for (auto& p : plain.parameters()) p.mutable_grad().reset();
        for (auto& p : replicated.parameters()) p.mutable_grad().reset();
        for (auto& p : sharded.parameters()) p.tensor.mutable_grad().reset();
        plain.forward(x).square().sum().backward();
        replicated.forward(x).square().sum().backward();
        nn::call(whole, x).square().sum().backward();
      }
      expect_same_grads(plain, replicated);
      for (const auto& p : sharded.parameters()) {
        const Box box = p.shard->box();
        const at::Tensor expected = plain.named_parameters()[p.name].grad();
        EXPECT_TRUE(at::equal(p.tensor.grad(), expected.narrow(0, box.offsets[0], box.shape[0]))) << p.name;
      }
    });
  }
}

TEST(ActivationCheckpoint, WhatItCannotDoIsRefused) {
  Net net(true);
  const at::Tensor x = waves({2, 6}, 0.0).requires_grad_();
  EXPECT_THAT(message_of([&] { torch::autograd::grad({net.forward(x).sum()}, {x}); }),
              HasSubstr("by backward() alone"));
  const at::Tensor y = net.forward(x).sum();
  y.backward({}, /*retain_graph=*/true);
  EXPECT_THAT(message_of([&] { y.backward(); }), HasSubstr("a second backward pass"));
}

}  // namespace
}  // namespace phalanx
