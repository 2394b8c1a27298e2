// The trainer on simulated devices, through Phalanx's GPU kernels: every layout, in 32 and 16 bits. With plain SGD the
// first losses have the bits of a run on the CPU through the same kernels: the second one depends on all gradients of
// the first step. Later ones do not, because libtorch's SGD rounds otherwise than the CPU's own.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "phalanx/base/testing/case_sample.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/testing/sim_device/torch/out_dtype.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

using ::testing::IsEmpty;

class GpuKernelsInTraining : public TrainerTest {
 protected:
  GpuKernelsInTraining() {
    at::set_num_threads(1);  // as the devices' kernels
    sim_.runtime.clear_races();
    sim_.runtime.clear_launches();
  }

  config::TrainConfig in_type(const std::string& type, const Layout& layout, const std::string& run) const {
    return config_of(layout, run,
                     {"--training.mixed_precision_param=" + type, "--training.steps=3", "--validation.no-enable",
                      "--optimizer.name=SGD", "--optimizer.momentum=0", "--optimizer.weight_decay=0",
                      "--optimizer.lr=0.1", "--training.max_norm=0"});
  }
  std::vector<double> on_cpu(const std::string& type, const Layout& layout, const std::string& run) {
    train(in_type(type, layout, run), layout.ranks);
    return losses(run);
  }
  std::vector<double> on_sim(const std::string& type, const Layout& layout, const std::string& run) {
    run_sim_ranks(layout.ranks, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
      const c10::Device device = sim_device::SimBackend::device(world->rank());
      Trainer(in_type(type, layout, run), {.world = world, .device = device, .quiet = true}).run();
    });
    EXPECT_THAT(sim_.runtime.races(), IsEmpty());
    sim_.runtime.clear_races();
    return losses(run);
  }
  static void expect_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << i;
  }

  void expect_losses_of_the_cpu(const Layout& layout) {
    const std::vector<double> exact = on_cpu("float32", layout, layout.name + "_cpu");
    for (const std::string& type : sampled(std::vector<std::string>{"float32", "bfloat16", "float16"}, 1)) {
      SCOPED_TRACE(layout.name + " in " + type);
      const std::string run = layout.name + "_" + type;
      const std::vector<double> found = on_sim(type, layout, run + "_sim");
      for (const char* name : {"rms_norm", "rms_norm_backward", "column_sums", "rotate", "swiglu", "swiglu_backward"}) {
        EXPECT_GT(sim_.runtime.launches_by_kernel()[name], 0) << name;
      }
      sim_.runtime.clear_launches();
      expect_near(found, exact, type == "float32" ? kOtherKernels : kSixteenBits);
      if (type == "float32") continue;  // the CPU has kernels of its own for attention in float32
      const kernels::HostGpuKernels kernels;
      const auto out_dtype = sim_device::register_out_dtype_on_cpu();
      const std::vector<double> same = on_cpu(type, layout, run + "_host");
      EXPECT_EQ(std::vector(found.begin(), found.begin() + 2), std::vector(same.begin(), same.begin() + 2));
    }
  }

  static constexpr double kOtherKernels = 1e-6;  // other kernels round in another order
  static constexpr double kSixteenBits = 1e-3;
  sim_device::SimBackend& sim_ = sim_device::sim_backend();
};

TEST_F(GpuKernelsInTraining, OneRank) { expect_losses_of_the_cpu({.name = "one"}); }
TEST_F(GpuKernelsInTraining, DataParallel) {
  expect_losses_of_the_cpu({.name = "ddp2", .ranks = 2});
  expect_losses_of_the_cpu({.name = "ddp4", .ranks = 4});
}
TEST_F(GpuKernelsInTraining, Sharded) {
  for (const int stage : {1, 2, 3}) {
    expect_losses_of_the_cpu({.name = fmt::format("zero{}", stage), .ranks = 2, .keys = sharded(stage)});
  }
}
TEST_F(GpuKernelsInTraining, TensorParallelWithSequenceParallelismAndOverlap) {
  expect_losses_of_the_cpu({.name = "tp", .ranks = 2, .tp = 2});
  expect_losses_of_the_cpu(
      {.name = "overlap", .ranks = 2, .tp = 2, .keys = {"--parallelism.enable_async_tensor_parallel"}});
}
TEST_F(GpuKernelsInTraining, Pipeline) { expect_losses_of_the_cpu({.name = "pp", .ranks = 2, .pp = 2}); }
TEST_F(GpuKernelsInTraining, TensorAndDataParallel) {
  expect_losses_of_the_cpu({.name = "tp_ddp", .ranks = 4, .tp = 2});
}
TEST_F(GpuKernelsInTraining, Recomputed) {
  expect_losses_of_the_cpu({.name = "full", .keys = {"--activation_checkpoint.mode=full"}});
  expect_losses_of_the_cpu(
      {.name = "selective",
       .keys = {"--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"}});
}
TEST_F(GpuKernelsInTraining, Accumulated) {
  expect_losses_of_the_cpu({.name = "accumulated", .keys = {"--training.local_batch_size=2"}});
}

}  // namespace
}  // namespace phalanx::train
