// Weight gradients that are computed after the backward pass, under checkpointing and data parallelism.
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/nn/feed_forward.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/rms_norm.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/tensor/init.h"
#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx {
namespace {

struct NormedLayers : nn::Module {
  NormedLayers() : nn::Module("NormedLayers") {
    norm = register_module("norm", std::make_shared<nn::RMSNorm>(16, 1e-5));
    mlp = register_module("mlp", std::make_shared<nn::FeedForward>(16, 24));
    head = register_module("head", std::make_shared<nn::Linear>(nn::LinearOptions{16, 4, true}));
  }
  at::Tensor forward(const at::Tensor& x) { return call(head, x + call(mlp, call(norm, x))); }
  std::shared_ptr<nn::RMSNorm> norm;
  std::shared_ptr<nn::FeedForward> mlp;
  std::shared_ptr<nn::Linear> head;
};

at::Tensor sample(std::uint64_t seed) {
  at::Tensor x = at::empty({6, 16}, at::kFloat);
  fill(x, Init::normal(0.0, 1.0), seed, "x");
  return x;
}

std::vector<at::Tensor> gradients_of(NormedLayers& net, std::uint64_t seed, bool deferred) {
  net.zero_grad();
  const auto queue = std::make_shared<WeightGradientQueue>();
  queue->set_deferring(deferred);
  at::Tensor loss;
  {
    const WeightGradientQueue::Scope scope(queue, {});
    loss = nn::call(net, sample(seed)).square().mean();
  }
  loss.backward();
  EXPECT_EQ(queue->size({}), deferred ? 5U : 0U);
  queue->flush({});
  std::vector<at::Tensor> result;
  for (const auto& p : net.parameters()) result.push_back(p.grad().clone());
  return result;
}

void expect_same_bits(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << "parameter " << i;
}

TEST(DeferredGradients, OfCheckpointedLayers) {
  const auto net = std::make_shared<NormedLayers>();
  nn::initialise(*net, 3);
  const auto expected = gradients_of(*net, 1, false);
  checkpoint_activations(*net->mlp);
  expect_same_bits(gradients_of(*net, 1, true), expected);
  checkpoint_activations(*net, op_sac_policy);
  expect_same_bits(gradients_of(*net, 1, true), expected);
}

TEST(DeferredGradients, AreAveragedWhenTheLastIsIn) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) {
    const auto net = std::make_shared<NormedLayers>();
    nn::initialise(*net, 3);
    DistributedDataParallel ddp(*net, comm);
    const auto seed = static_cast<std::uint64_t>(comm->rank());
    gradients_of(*net, 7, false);  // the first pass orders the buckets
    for (int pass = 0; pass < 3; ++pass) {
      const auto expected = gradients_of(*net, seed, false);
      expect_same_bits(gradients_of(*net, seed, true), expected);
      if (pass == 1) checkpoint_activations(*net->mlp);
    }
    EXPECT_EQ(ddp.statistics().synchronisations, 7);
  });
}

}  // namespace
}  // namespace phalanx
