// A mesh, a net and the comparison with DistributedDataParallel for tests of FullyShardedDataParallel.
#pragma once

#include <ATen/ops/allclose.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/testing/ddp_test_support.h"

namespace phalanx::fully_shard_testing {

inline constexpr std::int64_t kWidth = 12;

inline DeviceMesh sharding_mesh(const std::shared_ptr<Communicator>& world, int replicas = 1) {
  return {world, {{"dp_replicate", replicas}, {"dp_shard", world->size() / replicas}}};
}

/// `count` units of width x width and a bias.
inline torch::nn::Sequential linears(int count, std::int64_t width = kWidth) {
  torch::nn::Sequential net;
  for (int i = 0; i < count; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::Tanh());
  }
  nn::initialise(*net, 3);
  return net;
}

/// The whole tensors that `tensors` are this rank's rows of. Collective.
inline std::vector<NamedTensor> whole(const std::vector<NamedTensor>& tensors, Communicator& comm) {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor, shard] : tensors) {
    const at::Tensor sum = at::zeros(shard->spec.shape(), tensor.options());
    const Box box = shard->box();
    if (shard->is_first_holder()) sum.narrow(0, box.offsets[0], box.shape[0]).copy_(tensor);
    comm.all_reduce(sum);
    result.push_back({name, sum});
  }
  return result;
}

enum class Agreement { bits, closely };

inline void expect_equal(const std::vector<NamedTensor>& sharded, const std::vector<NamedTensor>& plain,
                         Agreement agreement = Agreement::bits) {
  ASSERT_EQ(sharded.size(), plain.size());
  for (const auto& expected : plain) {
    const auto found = std::ranges::find(sharded, expected.name, &NamedTensor::name);
    ASSERT_NE(found, sharded.end()) << expected.name;
    EXPECT_TRUE(agreement == Agreement::bits ? at::equal(found->tensor, expected.tensor)
                                             : at::allclose(found->tensor, expected.tensor, 1e-5, 1e-6))
        << expected.name;
  }
}

inline constexpr int kShardedSteps = 4;

struct ComparedRuns {
  int replicas = 1;  // of the shards: averages of averages are not in rank order, so results agree only closely
  int micro_batches = 1;
};

/// Trains `one` under DDP and `other` sharded for kShardedSteps from the same start, and expects the same bits. Inputs
/// are [5, width]. run(module, x, sharded or nullptr) returns the output. Returns the statistics of the sharded run.
template <class Module, class Other, class Run>
FullyShardStatistics expect_trains_as_ddp(const std::shared_ptr<Communicator>& world, Module& one, Other& other,
                                          std::int64_t width, std::size_t units, const Run& run,
                                          const FullyShardOptions& options = {}, const ComparedRuns& compared = {}) {
  DistributedDataParallel ddp(one, world);
  FullyShardedDataParallel sharded(other, sharding_mesh(world, compared.replicas), options);
  EXPECT_EQ(sharded.units().size(), units);
  const auto agreement = compared.replicas > 1 ? Agreement::closely : Agreement::bits;
  Sgd first(ddp.parameters(), {.momentum = 0.9}), second(sharded.parameters(), {.momentum = 0.9});
  for (int step = 0; step < kShardedSteps; ++step) {
    for (int part = 0; part < compared.micro_batches; ++part) {
      std::optional<DistributedDataParallel::NoSync> held_a;
      std::optional<FullyShardedDataParallel::NoSync> held_b;
      if (part + 1 < compared.micro_batches) {
        held_a.emplace(ddp.no_sync());
        held_b.emplace(sharded.no_sync());
      }
      const at::Tensor x = ddp_testing::waves({5, width}, world->rank() + 0.3 * step + part);
      FullyShardedDataParallel* none = nullptr;
      const at::Tensor loss_a = run(one, x, none).square().mean(), loss_b = run(other, x, &sharded).square().mean();
      expect_equal({{"loss", loss_b}}, {{"loss", loss_a}}, agreement);
      loss_a.backward();
      loss_b.backward();
    }
    first.step(0.1);
    second.step(0.1);
    first.zero_grad();
    second.zero_grad();
  }
  expect_equal(whole(sharded.parameters(), *world), ddp.parameters(), agreement);
  return sharded.statistics();
}

}  // namespace phalanx::fully_shard_testing
