// The trainer on simulated devices: every kind of parallelism has the losses of the CPU, and no races.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

class TrainerOnSim : public TrainerTest {
 protected:
  std::vector<double> losses_on_sim(const TrainConfig& config, const std::string& run, int ranks, bool over_nccl) {
    sim_.runtime.clear_races();
    sim_.runtime.host_waits().clear();
    run_sim_ranks(ranks, over_nccl, [&](const std::shared_ptr<Communicator>& world) {
      Trainer(config, {.world = world, .device = sim_device::SimBackend::device(world->rank()), .quiet = true}).run();
    });
    EXPECT_THAT(sim_.runtime.races(), ::testing::IsEmpty());
    sim_.runtime.clear_races();
    return losses(run);
  }

  // A step reads the loss, the norm, and whether the norm is finite.
  static constexpr std::uint64_t kWaitsOfAStep = 3;
  std::uint64_t item_waits() const {
    std::uint64_t sum = 0;
    for (const auto& [site, count] : sim_.runtime.host_waits().by_site()) sum += site.starts_with("item") ? count : 0;
    return sum;
  }

  void expect_losses_of_the_cpu(const Layout& layout, double tolerance) {
    const std::string on_cpu = layout.name + "_cpu";
    train(config_of(layout, on_cpu), layout.ranks);
    const std::vector<double> expected = losses(on_cpu);
    for (const bool over_nccl : {false, true}) {
      SCOPED_TRACE(layout.name + (over_nccl ? " over nccl" : " staged"));
      const std::string run = layout.name + (over_nccl ? "_nccl" : "_staged");
      const std::vector<double> found = losses_on_sim(config_of(layout, run), run, layout.ranks, over_nccl);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << i;
      if (layout.tp == 1 && layout.pp == 1) {
        EXPECT_LE(item_waits(), kWaitsOfAStep * layout.ranks * found.size());
      }
    }
  }

  sim_device::SimBackend& sim_ = sim_device::sim_backend();
};

constexpr double kOtherKernels = 1e-6;  // other kernels round in another order

TEST_F(TrainerOnSim, OneRank) { expect_losses_of_the_cpu({.name = "one"}, kOtherKernels); }
TEST_F(TrainerOnSim, DataParallel) { expect_losses_of_the_cpu({.name = "ddp", .ranks = 2}, kOtherKernels); }
TEST_F(TrainerOnSim, Zero3) {
  expect_losses_of_the_cpu({.name = "zero3", .ranks = 2, .keys = sharded(3)}, kOtherKernels);
}
TEST_F(TrainerOnSim, TensorParallel) { expect_losses_of_the_cpu({.name = "tp", .ranks = 2, .tp = 2}, kOtherKernels); }
TEST_F(TrainerOnSim, Pipeline) { expect_losses_of_the_cpu({.name = "pp", .ranks = 2, .pp = 2}, kOtherKernels); }
TEST_F(TrainerOnSim, Mix) {
  expect_losses_of_the_cpu({.name = "mix", .ranks = 4, .tp = 2, .keys = sharded(3, 2)}, kOtherKernels);
}
TEST_F(TrainerOnSim, Offloaded) {
  expect_losses_of_the_cpu({.name = "offload",
                            .ranks = 2,
                            .keys = {"--parallelism.data_parallel_shard_degree=2", "--training.enable_cpu_offload"}},
                           kOtherKernels);
}
TEST_F(TrainerOnSim, Recomputed) {
  expect_losses_of_the_cpu({.name = "recomputed", .keys = {"--activation_checkpoint.mode=full"}}, kOtherKernels);
}
TEST_F(TrainerOnSim, SixteenBits) {
  expect_losses_of_the_cpu(
      {.name = "bf16",
       .ranks = 2,
       .keys = {"--parallelism.data_parallel_shard_degree=2", "--training.mixed_precision_param=bfloat16"}},
      1e-3);
}

}  // namespace
}  // namespace phalanx::train
