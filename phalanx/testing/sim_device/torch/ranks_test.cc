// Data parallelism, sharded and not, of the debug Llama on simulated devices, a device for each rank: the losses of the
// CPU, and no race between the library's streams.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/stack.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/testing/sim_device/torch/sim_streams.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;
using ::testing::DoubleNear;
using ::testing::IsEmpty;
using ::testing::Pointwise;

constexpr std::int64_t kBatchOfAll = 8, kTokens = 8;
constexpr int kSteps = 3;

struct Sharding {
  int ranks = 2;
  int stage = 0;  // 0: DistributedDataParallel
  int replicas = 1;

  std::string name() const {
    const std::string kind = stage == 0 ? "Ddp" : (replicas > 1 ? "Hsdp" : "Zero") + std::to_string(stage);
    return kind + "On" + std::to_string(ranks);
  }
};

at::Tensor tokens_of(int step, const Communicator& world, c10::Device device) {
  const std::int64_t share = kBatchOfAll / world.size();
  const at::Tensor row = at::arange(kBatchOfAll, at::kLong).add(kBatchOfAll * step).unsqueeze(1);
  const at::Tensor column = at::arange(kTokens + 1, at::kLong).unsqueeze(0);
  const at::Tensor all = at::remainder(row.mul(7).add(column.mul(row.remainder(3).add(1))), 61);  // [batch, tokens + 1]
  const at::Tensor mine = all.narrow(0, world.rank() * share, share);
  return device.is_cpu() ? mine : mine.pin_memory().to(device, /*non_blocking=*/true);
}

class LlamaOnRank {
 public:
  LlamaOnRank(const std::shared_ptr<Communicator>& world, c10::Device device, const Sharding& layout)
      : world_(world), device_(device), model_(models::llama_flavor("debug"), {.device = device}) {
    nn::initialise(model_, 1);
    if (layout.stage == 0) {
      ddp_ = std::make_unique<DistributedDataParallel>(
          model_, world, DdpOptions{.first_bucket_bytes = 50'000, .bucket_bytes = 200'000});
    } else {
      const DeviceMesh mesh(world, {{"dp_replicate", layout.replicas}, {"dp_shard", layout.ranks / layout.replicas}});
      sharded_ = std::make_unique<FullyShardedDataParallel>(model_, mesh, FullyShardOptions{.stage = layout.stage});
    }
    optimizer_ = std::make_unique<AdamW>(parameters());
  }

  // The mean loss of all ranks, still on the device.
  at::Tensor step(int number) {
    const at::Tensor tokens = tokens_of(number, *world_, device_);
    const at::Tensor loss = model_.loss(tokens.narrow(1, 0, kTokens), tokens.narrow(1, 1, kTokens));
    loss.backward();
    const at::Tensor mean = loss.detach().clone();
    world_->all_reduce(mean, {.op = ReduceOp::avg});
    clip_grad_norm(parameters(), 1.0, sharded_ ? world_.get() : nullptr);
    optimizer_->step(1e-3);
    optimizer_->zero_grad();
    return mean;
  }

 private:
  std::vector<NamedTensor> parameters() const { return ddp_ ? ddp_->parameters() : sharded_->parameters(); }

  std::shared_ptr<Communicator> world_;
  c10::Device device_;
  models::Llama model_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<FullyShardedDataParallel> sharded_;
  std::unique_ptr<AdamW> optimizer_;
};

class SimRanks : public SimTest, public ::testing::WithParamInterface<Sharding> {
 protected:
  std::vector<double> train(bool on_device) {
    std::vector<double> losses;
    run_local_ranks(GetParam().ranks, [&](const std::shared_ptr<Communicator>& host) {
      const auto world = on_device ? sim_device::on_sim_device(host) : host;
      const c10::Device device =
          on_device ? sim_device::SimBackend::device(host->rank()) : c10::Device(c10::DeviceType::CPU);
      LlamaOnRank llama(world, device, GetParam());
      host->barrier();
      if (host->rank() == 0) sim.runtime.host_waits().clear();
      host->barrier();
      std::vector<at::Tensor> found;
      for (int i = 0; i < kSteps; ++i) found.push_back(llama.step(i));
      host->barrier();
      if (host->rank() == 0) waits_in_loop = sim.runtime.host_waits().by_site();
      host->barrier();
      const at::Tensor all = at::stack(found).to(at::kCPU, at::kDouble);
      if (host->rank() == 0) losses.assign(all.const_data_ptr<double>(), all.const_data_ptr<double>() + kSteps);
    });
    return losses;
  }
  std::map<std::string, std::uint64_t> waits_in_loop;
};

TEST_P(SimRanks, TrainAsOnTheCpu) {
  const std::vector<double> expected = train(/*on_device=*/false);
  sim.runtime.set_delays({.longest = 50us, .seed = 9});
  const std::vector<double> found = train(/*on_device=*/true);
  EXPECT_THAT(found, Pointwise(DoubleNear(1e-5), expected));
  EXPECT_THAT(waits_in_loop, IsEmpty());
  for (int rank = 0; rank < GetParam().ranks; ++rank) EXPECT_GT(sim.runtime.launches(rank), 100);
}

INSTANTIATE_TEST_SUITE_P(Layouts, SimRanks,
                         ::testing::Values(Sharding{.ranks = 1}, Sharding{.ranks = 2}, Sharding{.ranks = 4},
                                           Sharding{.ranks = 2, .stage = 1}, Sharding{.ranks = 2, .stage = 2},
                                           Sharding{.ranks = 2, .stage = 3}, Sharding{.ranks = 4, .stage = 3},
                                           Sharding{.ranks = 4, .stage = 3, .replicas = 2}),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace phalanx
