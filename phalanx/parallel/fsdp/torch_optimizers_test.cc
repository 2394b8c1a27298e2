// torch's own optimizers step the rows of a sharded model as they step the whole tensors of a replicated one.
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/testing/ddp_test_support.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"

namespace phalanx {
namespace {

using ddp_testing::waves;
using fully_shard_testing::expect_equal;
using fully_shard_testing::linears;
using fully_shard_testing::sharding_mesh;
using fully_shard_testing::whole;

std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

template <class Optimizer, class Options>
void expect_steps_alike(const Options& optimizer_options) {
  for (const int ranks : {1, 2, 3}) {
    for (const int stage : {1, 2, 3}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, ZeRO-" << stage);
      run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
        auto replicated_net = linears(3, 10), sharded_net = linears(3, 10);
        DistributedDataParallel ddp(*replicated_net, world);
        FullyShardedDataParallel sharded(*sharded_net, sharding_mesh(world), {.stage = stage});
        Optimizer first(tensors_of(ddp.parameters()), optimizer_options);
        Optimizer second(tensors_of(sharded.parameters()), optimizer_options);
        for (int step = 0; step < 3; ++step) {
          const at::Tensor x = waves({5, 10}, world->rank() + 0.3 * step);
          first.zero_grad();
          second.zero_grad();
          replicated_net->forward(x).square().mean().backward();
          sharded_net->forward(x).square().mean().backward();
          first.step();
          second.step();
        }
        expect_equal(whole(sharded.parameters(), *world), ddp.parameters());
      });
    }
  }
}

TEST(TorchOptimizers, SgdWithMomentumStepsShards) {
  expect_steps_alike<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
}

TEST(TorchOptimizers, AdamWStepsShards) {
  expect_steps_alike<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01).weight_decay(0.1));
}

TEST(TorchOptimizers, AdagradStepsShards) {
  expect_steps_alike<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.05));
}

}  // namespace
}  // namespace phalanx
