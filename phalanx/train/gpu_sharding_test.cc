// Sharded training on a real GPU; one is enough: two ranks share it, and exchange data through host memory. Built for
// every flavour; without a GPU each test reports that it is skipped. Everything runs in forked ranks, because CUDA does
// not survive a fork: this process itself never touches the device.
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <torch/nn/modules/container/functional.h>

#include <filesystem>
#include <stdexcept>

#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/backends/nccl/device_communicator.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/saved_attention.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/testing/fully_shard_test_support.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

const at::Device kGpu(at::kCUDA, 0);

std::shared_ptr<Communicator> world_of(const HostPort& server, int rank, int ranks, at::Device device) {
  at::set_num_threads(1);
  TcpStore store(server);
  return make_device_communicator(make_shm_communicator(store, rank, ranks), device, {.path = DevicePath::staged});
}

class GpuShardingTest : public TrainerTest {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "this machine has no GPU";
  }

  std::vector<double> losses_of(const config::TrainConfig& run, const std::string& name, int ranks, at::Device device) {
    TcpStoreServer server;
    EXPECT_EQ(run_forked_ranks(ranks,
                               [&](int rank) {
                                 const auto world = world_of(server.address(), rank, ranks, device);
                                 Trainer(run, {.world = world, .device = device, .quiet = true}).run();
                               }),
              "");
    return losses(name);
  }

  /// Trains on the CPU and on the GPU. `tolerance` is relative to each loss.
  void expect_losses_of_cpu(const Layout& layout, double tolerance) {
    SCOPED_TRACE(layout.name);
    const std::string cpu = layout.name + "_cpu", gpu = layout.name + "_gpu";
    const auto expected = losses_of(config_of(layout, cpu), cpu, layout.ranks, at::kCPU);
    const auto found = losses_of(config_of(layout, gpu), gpu, layout.ranks, kGpu);
    ASSERT_EQ(found.size(), expected.size());
    ASSERT_GE(found.size(), 12U);
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << i;
  }
};

TEST_F(GpuShardingTest, LossesAreThoseOfTheCpu) {
  std::vector<std::string> offloaded = sharded(3);
  offloaded.emplace_back("--training.enable_cpu_offload");
  const std::vector<Layout> layouts = {{"ddp1", 1},
                                       {"zero3_1", 1, 1, 1, sharded(3)},
                                       {"ddp2", 2},
                                       {"zero1_2", 2, 1, 1, sharded(1)},
                                       {"zero2_2", 2, 1, 1, sharded(2)},
                                       {"zero3_2", 2, 1, 1, sharded(3)},
                                       {"zero3_2_offloaded", 2, 1, 1, offloaded}};
  // Other kernels sum in another order. Over these steps the difference grows to at most 1e-4.
  for (const Layout& layout : layouts) expect_losses_of_cpu(layout, 1e-4);
}

// A run that continues from a checkpoint that was saved asynchronously.
TEST_F(GpuShardingTest, AsynchronousSavesResume) {
  const std::vector<std::string> keys = {"--training.steps=6", "--validation.no-enable", "--checkpoint.interval=3",
                                         "--checkpoint.async_mode=async"};
  const auto run = [&](const std::string& name) {
    return losses_of(config_of({name, 2, 1, 1, sharded(3)}, name, keys), name, 2, kGpu);
  };
  const std::vector<double> whole = run("whole");
  ASSERT_EQ(whole.size(), 6U);
  std::filesystem::create_directories(path("resumed") + "/checkpoint");
  std::filesystem::copy(path("whole") + "/checkpoint/step-3", path("resumed") + "/checkpoint/step-3");
  const std::vector<double> half = run("resumed");
  ASSERT_EQ(half.size(), 3U);
  // Sums of a GPU may come in another order in another run.
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(half[i], whole[3 + i], 1e-5 * whole[3 + i]) << i;
}

TEST_F(GpuShardingTest, SixteenBitsLearn) {
  for (const std::string type : {"bfloat16", "float16"}) {
    const Layout layout{type, 2, 1, 1, sharded(3)};
    const auto found = losses_of(
        config_of(layout, type, {"--training.mixed_precision_param=" + type, "--training.steps=30"}), type, 2, kGpu);
    ASSERT_GE(found.size(), 30U);
    EXPECT_LT(found.back(), 0.85 * found.front()) << type;
  }
}

// Experts are grouped products on a GPU that has them. Where they are not, this compares their products one by one.
TEST_F(GpuShardingTest, ExpertsInSixteenBitsLearnAsOnTheCpu) {
  const auto experts = [&](std::vector<std::string> keys) {
    const std::vector<std::string> model = mixture();
    keys.insert(keys.end(), model.begin(), model.end());
    keys.emplace_back("--training.mixed_precision_param=bfloat16");
    return keys;
  };
  std::vector<std::string> divided = sharded(3, 2);
  divided.emplace_back("--parallelism.expert_parallel_degree=2");
  const std::vector<Layout> layouts = {
      {"experts_ddp1", 1, 1, 1, experts({})},
      {"experts_capacity", 1, 1, 1, experts({"--training.moe_expert_capacity_factor=1"})},
      {"experts_zero3_2", 2, 1, 1, experts(sharded(3, 2))},
      {"experts_ep2", 2, 1, 1, experts(divided)}};
  // 16 bits, whose spacing is 2^-8 of a number, are rounded at other places.
  for (const Layout& layout : layouts) expect_losses_of_cpu(layout, 1e-2);
}

TEST_F(GpuShardingTest, ExpertsAreGroupedAndAttentionIsSavedWhereTheGpuCan) {
  EXPECT_EQ(run_forked_ranks(1,
                             [](int) {
                               const nn::TensorOptionsOfModule options{.dtype = at::kBFloat16, .device = kGpu};
                               nn::MixtureOfExperts mixture(
                                   {.dim = 64, .hidden = 96, .experts = 4, .experts_per_token = 2}, options);
                               nn::initialise(mixture, 1);
                               const at::Tensor rows = at::ones({8, 64}, at::TensorOptions(kGpu).dtype(at::kBFloat16));
                               const bool can = kernels::gpu::cuda_capability(0) == 9;
                               if (mixture.experts->can_be_grouped(rows) != can) {
                                 throw std::runtime_error("grouped products are not those of the GPU");
                               }
                               const at::Tensor q = rows.view({1, 2, 8, 32});
                               kernels::SavedActivations saved(op_sac_policy);
                               const kernels::SavedActivations::Scope scope(&saved,
                                                                            kernels::SavedActivations::Run::forward);
                               if (!kernels::savable_attention(q, q, q)) {
                                 throw std::runtime_error("no kernel whose result can be saved");
                               }
                             }),
            "");
}

TEST_F(GpuShardingTest, SavedAttentionHasTheSameBits) {
  const auto losses_with = [&](const std::string& name, std::vector<std::string> keys) {
    keys.insert(keys.end(), {"--training.mixed_precision_param=bfloat16", "--debug.deterministic"});
    return losses_of(config_of({name, 1}, name, keys), name, 1, kGpu);
  };
  const auto expected = losses_with("nothing", {});
  EXPECT_EQ(losses_with("blocks", {"--activation_checkpoint.mode=full"}), expected);
  EXPECT_EQ(losses_with("operations",
                        {"--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"}),
            expected);
}

// Slow kernels before each layer, forward and backward: the host, and the communication stream, run far ahead of the
// computation. If a unit's buffer is overwritten by an all-gather, or released, before the kernels that use it have
// run, the numbers differ from those of a run without slow kernels.
TEST_F(GpuShardingTest, NoBufferIsUsedAgainTooEarly) {
  constexpr int kUnits = 6, kSteps = 3;
  constexpr std::int64_t kSide = 512, kSlow = 4096;
  TcpStoreServer server;
  const auto trained = [&](const std::shared_ptr<Communicator>& world, bool is_slow) {
    const at::Tensor big = at::ones({is_slow ? kSlow : 1, is_slow ? kSlow : 1}, at::TensorOptions(kGpu));
    const auto delay = [big](const at::Tensor& x) {
      const auto take_time = [big] {
        const at::NoGradGuard no_grad;
        at::Tensor y = big;
        for (int i = 0; i < 8; ++i) y = at::matmul(y, big).mul_(1.0 / static_cast<double>(big.size(0)));
      };
      take_time();
      if (x.requires_grad()) x.register_hook([take_time](const at::Tensor&) { take_time(); });
      return x;
    };
    torch::nn::Sequential net;
    for (int i = 0; i < kUnits; ++i) {
      net->push_back(torch::nn::Functional(delay));
      net->push_back(torch::nn::Linear(kSide, kSide));
      net->push_back(torch::nn::Tanh());
    }
    nn::initialise(*net, 3);
    net->to(kGpu);
    FullyShardedDataParallel sharded(*net, fully_shard_testing::sharding_mesh(world));
    Sgd sgd(sharded.parameters(), {.momentum = 0.9});
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor x = ddp_testing::waves({64, kSide}, world->rank() + 0.3 * step).to(kGpu);
      net->forward(x).square().mean().backward();
      sgd.step(0.1);
      sgd.zero_grad();
    }
    std::vector<at::Tensor> parameters;
    for (const auto& named : sharded.parameters()) parameters.push_back(named.tensor.detach().to(at::kCPU).clone());
    return parameters;
  };
  EXPECT_EQ(run_forked_ranks(2,
                             [&](int rank) {
                               const auto world = world_of(server.address(), rank, 2, kGpu);
                               const auto expected = trained(world, false), found = trained(world, true);
                               if (expected.size() != 2 * kUnits) throw std::runtime_error("parameters are missing");
                               for (std::size_t i = 0; i < expected.size(); ++i)
                                 if (!at::equal(found[i], expected[i]))
                                   throw std::runtime_error(fmt::format("parameter {} differs", i));
                             }),
            "");
}

}  // namespace
}  // namespace phalanx::train
