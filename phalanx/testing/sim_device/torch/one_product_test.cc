// Queries, keys and values are one product on a device, and so are gate and up, in every form of parallelism: with one
// rank, in buckets of DistributedDataParallel, in units of FullyShardedDataParallel and in the parts of tensor
// parallelism. Counted on a simulated device.
#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/fused_linear.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/nn/attention.h"
#include "phalanx/nn/feed_forward.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx::one_product_test {
namespace {

enum class Form { replicated, zero1, zero3, tensor_parallel, overlapped };

struct ProductsCase {
  std::string name;
  int ranks = 1;
  Form form = Form::replicated;
  at::ScalarType weights = at::kBFloat16;
  bool autocast = false;
  bool selective = false;  // every block is recomputed, but for some of its products
  int per_block = 12;      // products of a block: four of the forward pass, with two more each in the backward pass
};

class OneProduct : public SimTest, public ::testing::WithParamInterface<ProductsCase> {
 protected:
  static void step(const std::shared_ptr<Communicator>& world, int layers) {
    const ProductsCase& how = GetParam();
    const c10::Device device = sim_device::SimBackend::device(world->rank());
    models::LlamaConfig config = models::llama_flavor("5M");
    config.vocab_size = 256;
    config.n_layers = layers;
    const bool is_sharded = how.form == Form::zero1 || how.form == Form::zero3;
    const bool is_cut = how.form == Form::tensor_parallel || how.form == Form::overlapped;
    models::Llama model(config, {.dtype = how.weights, .device = device, .without_memory = is_sharded || is_cut});
    for (const auto& layer : model.layers) {
      if (how.selective) checkpoint_activations(*layer, op_sac_policy);
    }
    const DeviceMesh mesh(world, {{is_cut ? "tp" : "dp_shard", how.ranks}});
    std::vector<std::shared_ptr<Communicator>> groups;
    std::unique_ptr<DistributedDataParallel> ddp;
    std::unique_ptr<FullyShardedDataParallel> fsdp;
    if (is_sharded) {
      fsdp = std::make_unique<FullyShardedDataParallel>(model, mesh,
                                                        FullyShardOptions{.stage = how.form == Form::zero1 ? 1 : 3});
      fsdp->initialise(7);
    } else if (is_cut) {
      groups =
          models::parallelize_llama(model, mesh, {.sequence_parallel = how.form == Form::overlapped, .split_dim = 1});
      nn::initialise(model, 7);
    } else {
      nn::initialise(model, 7);
      ddp = std::make_unique<DistributedDataParallel>(model, world);
    }
    const at::Tensor tokens = at::randint(config.vocab_size, {2, 64}, at::kLong).to(device);
    {
      const kernels::AutocastScope scope(device.type(), {how.autocast, at::kBFloat16});
      const at::Tensor loss = model.loss(tokens, tokens);
      loss.backward();
    }
    sim_device::sim_backend().runtime.synchronize_device(world->rank(), "before groups are left");
    for (const auto& layer : model.layers) {
      const auto& attention = dynamic_cast<const nn::Attention&>(*layer->attention);
      const auto& net = dynamic_cast<const nn::FeedForward&>(*layer->feed_forward);
      EXPECT_TRUE(kernels::are_adjacent({attention.wq->weight, attention.wk->weight, attention.wv->weight}));
      EXPECT_TRUE(kernels::are_adjacent({net.w1->weight, net.w3->weight}));
    }
  }

  std::uint64_t products(int layers) {
    sim.runtime.clear_launches();
    run_sim_ranks(GetParam().ranks, /*over_nccl=*/true, [&](const auto& world) { step(world, layers); });
    std::uint64_t sum = 0;
    std::string text;
    for (const auto& [name, count] : sim.runtime.launches_by_kernel()) {
      if (std::string(name).find("mm") != std::string::npos) sum += count, text += fmt::format(" {} {},", count, name);
    }
    fmt::print("{}, {} layers: {} products:{}\n", GetParam().name, layers, sum, text);
    return sum;
  }
};

TEST_P(OneProduct, OfAllWeightsWithOneInput) {
  const std::uint64_t of_two_blocks = products(3) - products(1);
  EXPECT_EQ(of_two_blocks, static_cast<std::uint64_t>(2 * GetParam().ranks * GetParam().per_block));
}

INSTANTIATE_TEST_SUITE_P(
    Forms, OneProduct,
    ::testing::Values(ProductsCase{.name = "one_rank"}, ProductsCase{.name = "float32", .weights = at::kFloat},
                      ProductsCase{.name = "autocast", .weights = at::kFloat, .autocast = true},
                      // The second run repeats the products of wo, of gate and up, and of w2.
                      ProductsCase{.name = "selective", .selective = true, .per_block = 15},
                      ProductsCase{.name = "ddp", .ranks = 2},
                      ProductsCase{.name = "zero1", .ranks = 2, .form = Form::zero1},
                      ProductsCase{.name = "zero3", .ranks = 2, .form = Form::zero3},
                      // Weight gradients that are deferred until an exchange is in flight have a product each.
                      ProductsCase{
                          .name = "tensor_parallel", .ranks = 2, .form = Form::tensor_parallel, .per_block = 15},
                      // Twice as many, as they overlap the exchange of two sequences, but those of weight gradients.
                      ProductsCase{.name = "overlapped", .ranks = 2, .form = Form::overlapped, .per_block = 20}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace phalanx::one_product_test
