// Units that hold frozen parameters beside trained ones.
#include <ATen/ops/equal.h>
#include <ATen/ops/tanh.h>

#include <algorithm>

#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/nn/linear.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"

namespace phalanx {
namespace frozen_parameters_test {

using ddp_testing::waves;
using fully_shard_testing::linears;
using fully_shard_testing::sharding_mesh;
using fully_shard_testing::whole;

struct Given {
  std::string name;
  int ranks = 2;
  FullyShardOptions options = {};
  int replicas = 1;
  bool rows_only = false;  // gradients are reduced in every micro-batch
};

void freeze_weights(const torch::nn::Sequential& net) {
  for (auto& p : net->named_parameters()) p.value().set_requires_grad(p.key().ends_with("bias"));
}

TEST(FrozenParameters, TrainTheOthersAsDataParallelismDoes) {
  const std::vector<Given> all = {{"zero1", 2, {.stage = 1}},
                                  {"zero2", 2, {.stage = 2}},
                                  {"zero3", 3},
                                  {"zero3 kept", 2, {.reshard_after_forward = false}},
                                  {"zero3 kept by two", 4, {.reshard_group = 2}},
                                  {"hsdp", 4, {}, 2},
                                  {"no prefetch", 2, {.prefetch = false}},
                                  {"offload", 2, {.offload = true}},
                                  {"one rank", 1},
                                  {"rows", 2, {}, 1, true}};
  for (const Given& given : all) {
    SCOPED_TRACE(given.name);
    run_local_ranks(given.ranks, [&](const std::shared_ptr<Communicator>& world) {
      auto a = linears(3, 10), b = linears(3, 10);
      for (auto& net : {a, b}) freeze_weights(net);
      const auto before = b->parameters()[0].detach().clone();
      DistributedDataParallel ddp(*a, world);
      FullyShardedDataParallel sharded(*b, sharding_mesh(world, given.replicas), given.options);
      EXPECT_EQ(sharded.parameters().size(), 6U);
      EXPECT_EQ(sharded.trained_parameters().size(), 3U);
      Sgd first(ddp.parameters(), {.momentum = 0.9}), second(sharded.trained_parameters(), {.momentum = 0.9});
      for (int step = 0; step < 3; ++step) {
        for (int part = 0; part < 2; ++part) {
          std::optional<DistributedDataParallel::NoSync> held;
          std::optional<FullyShardedDataParallel::NoSync> held_too;
          std::optional<FullyShardedDataParallel::NoAllReduce> rows;
          if (part == 0) held.emplace(ddp.no_sync());
          if (part == 0 && given.rows_only) rows.emplace(sharded.no_all_reduce());
          if (part == 0 && !given.rows_only) held_too.emplace(sharded.no_sync());
          const at::Tensor x = waves({4, 10}, world->rank() + 0.3 * step + part);
          a->forward(x).square().mean().backward();
          b->forward(x).square().mean().backward();
        }
        first.step(0.1);
        second.step(0.1);
        first.zero_grad();
        second.zero_grad();
      }
      const auto agreement = given.replicas > 1 || given.rows_only ? fully_shard_testing::Agreement::closely
                                                                   : fully_shard_testing::Agreement::bits;
      fully_shard_testing::expect_equal(whole(sharded.trained_parameters(), *world), ddp.parameters(), agreement);
      const std::vector<NamedTensor> all_parameters = whole(sharded.parameters(), *world);
      const auto weight = std::ranges::find(all_parameters, "0.weight", &NamedTensor::name);
      EXPECT_TRUE(at::equal(weight->tensor, before));
      for (const NamedTensor& p : sharded.parameters()) EXPECT_FALSE(p.tensor.grad().defined()) << p.name;
    });
  }
}

TEST(FrozenParameters, HaveNoGradientMemoryAndAreNotReduced) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    constexpr std::int64_t kWidth = 64;
    auto net = linears(6, kWidth);
    freeze_weights(net);
    FullyShardedDataParallel sharded(*net, sharding_mesh(world));
    for (int step = 0; step < 2; ++step) net->forward(waves({4, kWidth}, step)).square().sum().backward();
    const FullyShardStatistics found = sharded.statistics();
    const std::int64_t bias = kWidth * 4, weight = kWidth * kWidth * 4;
    EXPECT_EQ(found.shard_bytes, 6 * (bias + weight) / 2);
    EXPECT_EQ(found.unsharded_bytes, 2 * (bias + weight));
    EXPECT_EQ(found.gradient_bytes, 2 * bias);
    EXPECT_EQ(found.sharded_grad_bytes, 6 * bias / 2);
    EXPECT_EQ(found.reduced_bytes, 2 * 6 * bias);
    EXPECT_EQ(found.padding_bytes, 0);
    EXPECT_EQ(found.prefetches, 2 * (5 + 5));  // with their unit's trained ones: one gather for both
  });
}

/// tanh(W x + b), W frozen and in a type of its own.
struct NarrowBase : nn::Module {
  explicit NarrowBase(at::ScalarType type) : nn::Module("NarrowBase") {
    weight = make_parameter("weight", {32, 32}, {.dtype = type}, Init::normal(0.0, 0.5));
    weight.set_requires_grad(false);
    bias = make_parameter("bias", {32});
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(kernels::linear(x, weight.to(x.scalar_type()), bias)); }
  at::Tensor weight, bias;
};

struct NarrowBases : nn::Module {
  explicit NarrowBases(at::ScalarType type) : nn::Module("NarrowBases") {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module(std::to_string(i), std::make_shared<NarrowBase>(type)));
    }
    nn::initialise(*this, 5);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = nn::call(layer, x);
    return x;
  }
  std::vector<std::shared_ptr<NarrowBase>> layers;
};

TEST(FrozenParameters, MayHaveAnotherTypeThanTheTrainedOnes) {
  for (const int stage : {1, 3}) {
    run_local_ranks(2, [stage](const std::shared_ptr<Communicator>& world) {
      NarrowBases a(at::kBFloat16), b(at::kBFloat16);
      DistributedDataParallel ddp(a, world);
      FullyShardedDataParallel sharded(b, sharding_mesh(world), {.stage = stage});
      const at::Tensor x = waves({4, 32}, world->rank());
      nn::call(a, x).square().mean().backward();
      nn::call(b, x).square().mean().backward();
      std::vector<NamedTensor> gradients;
      for (const NamedTensor& p : sharded.trained_parameters()) {
        gradients.push_back({p.name, p.tensor.grad(), p.shard});
        EXPECT_EQ(p.tensor.grad().scalar_type(), at::kFloat);
      }
      std::vector<NamedTensor> expected;
      for (const NamedTensor& p : ddp.parameters()) expected.push_back({p.name, p.tensor.grad()});
      fully_shard_testing::expect_equal(whole(gradients, *world), expected);
      for (const NamedTensor& p : sharded.parameters()) {
        EXPECT_EQ(p.tensor.scalar_type(), p.name.ends_with("weight") ? at::kBFloat16 : at::kFloat);
      }
      const std::int64_t of_weights = 3 * 1024 * 2, of_biases = 3 * 32 * 4;
      EXPECT_EQ(sharded.statistics().shard_bytes, stage == 3 ? (of_weights + of_biases) / 2 : of_weights + of_biases);
    });
  }
}

TEST(FrozenParameters, TrainedOnesOfTwoTypesInAUnitAreStillRefused) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    NarrowBases net(at::kBFloat16);
    net.layers[1]->weight.set_requires_grad(true);
    EXPECT_THAT(error_text<Error>([&] { FullyShardedDataParallel(net, sharding_mesh(world)); }),
                HasSubstr("expected one dtype and one device in a unit"));
  });
}

}  // namespace frozen_parameters_test
}  // namespace phalanx
