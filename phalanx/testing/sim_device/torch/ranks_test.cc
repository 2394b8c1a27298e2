// Data parallelism, sharded and not, of the debug Llama on simulated devices, a device for each rank: the losses of the
// CPU, no wait of the host, and no race between the library's streams. Where the library forgets a wait around a
// collective, that is found.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/testing/case_sample.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/testing/sim_device/torch/sim_streams.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::DoubleNear;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pointwise;

constexpr std::int64_t kBatchOfAll = 8, kTokens = 8;
constexpr int kSteps = 3;

struct Sharding {
  int ranks = 2;
  int stage = 0;  // 0: DistributedDataParallel
  int replicas = 1;
  bool over_nccl = false;  // else through pinned memory

  std::string name() const {
    const std::string kind = stage == 0 ? "Ddp" : (replicas > 1 ? "Hsdp" : "Zero") + std::to_string(stage);
    return kind + "On" + std::to_string(ranks) + (over_nccl ? "Nccl" : "Staged");
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
  std::vector<double> train(const std::shared_ptr<Communicator>& world, c10::Device on) {
    LlamaOnRank llama(world, on, GetParam());
    const auto on_first_rank = [&](const auto& body) {
      world->barrier();
      if (world->rank() == 0) body();
      world->barrier();
    };
    on_first_rank([&] { sim.runtime.host_waits().clear(); });
    std::vector<at::Tensor> losses;
    for (int i = 0; i < kSteps; ++i) losses.push_back(llama.step(i));
    on_first_rank([&] { waits_in_loop = sim.runtime.host_waits().by_site(); });
    const at::Tensor all = at::stack(losses).to(at::kCPU, at::kDouble);
    return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + kSteps};
  }

  std::vector<double> losses_on_cpu() {
    std::vector<double> losses;
    run_local_ranks(GetParam().ranks, [&](const std::shared_ptr<Communicator>& world) {
      const auto mine = train(world, c10::Device(c10::DeviceType::CPU));
      if (world->rank() == 0) losses = mine;
    });
    return losses;
  }
  std::vector<double> losses_on_devices() {
    std::vector<double> losses;
    run_sim_ranks(GetParam().ranks, GetParam().over_nccl, [&](const std::shared_ptr<Communicator>& world) {
      const auto mine = train(world, sim_device::SimBackend::device(world->rank()));
      if (world->rank() == 0) losses = mine;
    });
    return losses;
  }
  std::map<std::string, std::uint64_t> waits_in_loop;
};

TEST_P(SimRanks, TrainAsOnTheCpu) {
  const std::vector<double> expected = losses_on_cpu();
  sim.runtime.set_delays({.longest = 50us, .seed = 9});
  const std::vector<double> found = losses_on_devices();
  EXPECT_THAT(found, Pointwise(DoubleNear(1e-5), expected));
  EXPECT_THAT(waits_in_loop, IsEmpty());
  for (int rank = 0; rank < GetParam().ranks; ++rank) EXPECT_GT(sim.runtime.launches(rank), 100);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, SimRanks,
    ::testing::ValuesIn(sampled(std::vector<Sharding>{{.ranks = 1},
                                                      {.ranks = 2},
                                                      {.ranks = 4},
                                                      {.ranks = 2, .stage = 1},
                                                      {.ranks = 2, .stage = 2},
                                                      {.ranks = 2, .stage = 3},
                                                      {.ranks = 4, .stage = 3},
                                                      {.ranks = 4, .stage = 3, .replicas = 2},
                                                      {.ranks = 2, .over_nccl = true},
                                                      {.ranks = 2, .stage = 1, .over_nccl = true},
                                                      {.ranks = 4, .stage = 3, .over_nccl = true},
                                                      {.ranks = 4, .stage = 3, .replicas = 2, .over_nccl = true}},
                                4)),
    [](const auto& info) { return info.param.name(); });

// --- planted faults --------------------------------------------------------------------------------------------------

enum class Forgets { nothing, wait_before, wait_after };

struct Fault {
  Forgets what = Forgets::nothing;
  bool over_nccl = false;
};

// The streams of a library that forgets to wait.
class ForgetfulStreams final : public DeviceStreams {
 public:
  ForgetfulStreams(int device, Forgets what) : streams_(sim_device::make_sim_streams(device)), what_(what) {}
  std::string device_identity() const override { return streams_->device_identity(); }
  std::shared_ptr<void> enter() const override { return streams_->enter(); }
  std::shared_ptr<void> enter_stream(DeviceStream stream) override { return streams_->enter_stream(stream); }
  DeviceStream make_stream() override { return streams_->make_stream(); }
  DeviceStream current_stream() const override { return streams_->current_stream(); }
  std::shared_ptr<DeviceEvent> record(DeviceStream stream) override { return streams_->record(stream); }
  std::shared_ptr<DeviceEvent> record_current() override { return streams_->record_current(); }
  void wait(DeviceStream stream, const DeviceEvent& event) override {
    if (what_ != Forgets::wait_before) streams_->wait(stream, event);
  }
  void current_waits(const DeviceEvent& event) override {
    if (what_ != Forgets::wait_after) streams_->current_waits(event);
  }
  void copy(DeviceStream stream, void* to, const void* from, std::size_t bytes) override {
    streams_->copy(stream, to, from, bytes);
  }
  std::shared_ptr<std::byte> make_pinned(std::size_t bytes) override { return streams_->make_pinned(bytes); }

 private:
  std::shared_ptr<DeviceStreams> streams_;
  Forgets what_;
};

class SimCollectiveFaults : public SimTest, public ::testing::WithParamInterface<Fault> {
 protected:
  void run(const std::function<void(const std::shared_ptr<Communicator>&)>& body) {
    run_sim_ranks(2, GetParam().over_nccl, body, [](int device) -> std::shared_ptr<DeviceStreams> {
      return std::make_shared<ForgetfulStreams>(device, GetParam().what);
    });
  }
  // Nothing, or a race of the operator beside the forgotten wait with the collective.
  void expect_found(const char* before, const char* after) {
    const char* const collective = GetParam().over_nccl ? "'nccl " : "'copy for a collective'";
    const std::vector<std::string> races = take_races();
    if (GetParam().what == Forgets::nothing) {
      EXPECT_THAT(races, IsEmpty());
    } else {
      EXPECT_THAT(races, Contains(AllOf(HasSubstr(collective),
                                        HasSubstr(GetParam().what == Forgets::wait_before ? before : after))));
    }
  }
};

TEST_P(SimCollectiveFaults, AnAsynchronousAllReduce) {
  run([](const std::shared_ptr<Communicator>& world) {
    const at::Tensor x = at::ones({64}, on_sim(world->rank())).add_(1);
    Work work = world->all_reduce(x, {.async = true});
    work.wait();
    const at::Tensor used = at::mul(x, x);
  });
  expect_found("'aten::add_.Tensor'", "'aten::mul.Tensor'");
}

// The gradient is read before its reduce-scatter has ended.
TEST_P(SimCollectiveFaults, AReduceScatter) {
  run([](const std::shared_ptr<Communicator>& world) {
    const at::Tensor grad = at::ones({64}, on_sim(world->rank())).add_(1);
    const at::Tensor shard = at::zeros({32}, on_sim(world->rank()));
    Work work = world->reduce_scatter(shard, grad, {.async = true});
    work.wait();
    const at::Tensor used = at::mul(shard, shard);
  });
  expect_found("'aten::add_.Tensor'", "'aten::mul.Tensor'");
}

TEST_P(SimCollectiveFaults, AnAllGatherOfParameters) {
  run([](const std::shared_ptr<Communicator>& world) {
    const at::Tensor shard = at::ones({32}, on_sim(world->rank())).add_(1);
    const at::Tensor whole = at::zeros({64}, on_sim(world->rank()));
    Work work = world->all_gather(whole, shard, {.async = true});
    work.wait();
    const at::Tensor used = at::mul(whole, whole);
  });
  expect_found("'aten::add_.Tensor'", "'aten::mul.Tensor'");
}

// Through pinned memory the host sees the end of a collective before it goes on, so there nothing depends on the wait
// afterwards.
INSTANTIATE_TEST_SUITE_P(Streams, SimCollectiveFaults,
                         ::testing::Values(Fault{}, Fault{Forgets::wait_before}, Fault{Forgets::nothing, true},
                                           Fault{Forgets::wait_before, true}, Fault{Forgets::wait_after, true}),
                         [](const auto& info) {
                           const std::string what = info.param.what == Forgets::nothing       ? "Sound"
                                                    : info.param.what == Forgets::wait_before ? "NoWaitBefore"
                                                                                              : "NoWaitAfter";
                           return what + (info.param.over_nccl ? "Nccl" : "Staged");
                         });

}  // namespace
}  // namespace phalanx
