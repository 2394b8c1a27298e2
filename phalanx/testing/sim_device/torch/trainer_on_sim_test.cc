// The trainer on simulated devices: every kind of parallelism has the losses of the CPU, and no races.
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/base/testing/case_sample.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/train/model/parallel_model.h"
#include "phalanx/train/testing/expert_biases.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

class TrainerOnSim : public TrainerTest {
 protected:
  std::vector<double> losses_on_sim(const config::TrainConfig& config, const std::string& run, int ranks,
                                    bool over_nccl) {
    sim_.runtime.clear_races();
    sim_.runtime.host_waits().clear();
    run_sim_ranks(ranks, over_nccl, [&](const std::shared_ptr<Communicator>& world) {
      Trainer(config, {.world = world, .device = sim_device::SimBackend::device(world->rank()), .quiet = true}).run();
    });
    EXPECT_THAT(sim_.runtime.races(), ::testing::IsEmpty());
    sim_.runtime.clear_races();
    return losses(run);
  }

  // With offloading the host reads a step's loss. A validation may read a few numbers.
  static constexpr std::uint64_t kWaitsOfAStep = 1;
  std::uint64_t item_waits() const {
    std::uint64_t sum = 0;
    for (const auto& [site, count] : sim_.runtime.host_waits().by_site()) sum += site.starts_with("item") ? count : 0;
    return sum;
  }

  void expect_losses_of_a_family(const std::string& name) {
    const std::string model = "--model.name=" + name;
    const std::vector<Layout> layouts = {
        {.name = "tp", .ranks = 2, .tp = 2, .keys = {model}},
        {.name = "ring", .ranks = 2, .keys = {model, "--parallelism.context_parallel_exchange=ring"}, .cp = 2}};
    for (const Layout& layout : sampled(layouts, 1)) expect_losses_of_the_cpu(layout);
  }
  void expect_losses_of_the_cpu(const Layout& layout, double tolerance = kOtherKernels) {
    const std::string on_cpu = layout.name + "_cpu";
    train(config_of(layout, on_cpu), layout.ranks);
    const std::vector<double> expected = losses(on_cpu);
    for (const bool over_nccl : {false, true}) {
      SCOPED_TRACE(layout.name + (over_nccl ? " over nccl" : " staged"));
      const std::string run = layout.name + (over_nccl ? "_nccl" : "_staged");
      const std::vector<double> found = losses_on_sim(config_of(layout, run), run, layout.ranks, over_nccl);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << i;
      EXPECT_LE(item_waits(), kWaitsOfAStep * layout.ranks * found.size());
    }
  }

  static constexpr double kOtherKernels = 1e-6;  // other kernels round in another order
  static constexpr double kFloat8 = 3e-3;
  sim_device::SimBackend& sim_ = sim_device::sim_backend();
};

std::vector<std::string> schedule(const std::string& name) {
  return {"--parallelism.pipeline_parallel_schedule=" + name};
}

TEST_F(TrainerOnSim, OneRank) { expect_losses_of_the_cpu({.name = "one"}); }
TEST_F(TrainerOnSim, DataParallel) { expect_losses_of_the_cpu({.name = "ddp", .ranks = 2}); }
TEST_F(TrainerOnSim, Sharded) {
  const std::vector<Layout> layouts = {{.name = "zero1", .ranks = 2, .keys = sharded(1)},
                                       {.name = "zero2", .ranks = 2, .keys = sharded(2)},
                                       {.name = "zero3", .ranks = 2, .keys = sharded(3)},
                                       {.name = "hsdp", .ranks = 4, .keys = sharded(3, 2)}};
  for (const Layout& layout : sampled(layouts, 2)) expect_losses_of_the_cpu(layout);
}
// Weights and moments of 16 bits. Other kernels round products to other neighbours.
TEST_F(TrainerOnSim, StateOf16Bits) {
  const auto narrow = [](std::vector<std::string> keys = {}) {
    keys.insert(keys.end(), {"--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16",
                             "--optimizer.state_dtype=bfloat16", "--optimizer.no-master_weights"});
    return keys;
  };
  constexpr double kBfloat16 = 1e-2;
  const std::vector<Layout> layouts = {{.name = "one", .keys = narrow()},
                                       {.name = "zero3", .ranks = 2, .keys = narrow(sharded(3))},
                                       {.name = "zero3_tp", .ranks = 4, .tp = 2, .keys = narrow(sharded(3, 2))},
                                       {.name = "pp", .ranks = 2, .pp = 2, .keys = narrow()}};
  for (const Layout& layout : sampled(layouts, 2)) expect_losses_of_the_cpu(layout, kBfloat16);
}
TEST_F(TrainerOnSim, TensorParallel) { expect_losses_of_the_cpu({.name = "tp", .ranks = 2, .tp = 2}); }
// Documents kept apart, by kernels of variable lengths.
TEST_F(TrainerOnSim, PackedDocuments) {
  data::TokenFileWriter writer(path("documents"), {.vocab_size = 512});
  for (std::size_t at = 0; at + 40 < tokens_.size(); at += 2 + at * 7 % 37) {
    const auto begin = tokens_.begin() + static_cast<std::ptrdiff_t>(at);
    writer.add_document(std::vector<std::int32_t>(begin, begin + static_cast<std::ptrdiff_t>(2 + at * 7 % 37)));
  }
  writer.finish();
  const auto packed = [&](std::vector<std::string> keys = {}) {
    keys.insert(keys.end(), {"--training.dataset_path=" + path("documents"), "--training.attn_mask_type=block_causal",
                             "--training.packing=best_fit"});
    return keys;
  };
  const std::vector<Layout> layouts = {
      {.name = "one", .keys = packed()},
      {.name = "zero3", .ranks = 2, .keys = packed(sharded(3))},
      {.name = "tp", .ranks = 2, .tp = 2, .keys = packed()},
      {.name = "pp", .ranks = 2, .pp = 2, .keys = packed()},
      {.name = "cp", .ranks = 2, .keys = packed(), .cp = 2},
      {.name = "cp_heads", .ranks = 2, .keys = packed({"--parallelism.context_parallel_exchange=heads"}), .cp = 2},
      {.name = "ring", .ranks = 4, .keys = packed({"--parallelism.context_parallel_exchange=ring"}), .cp = 4}};
  for (const Layout& layout : sampled(layouts, 3)) expect_losses_of_the_cpu(layout);
  // 16 bits are rounded at other places.
  expect_losses_of_the_cpu({.name = "ddp", .ranks = 2, .keys = packed({"--training.mixed_precision_param=bfloat16"})},
                           1e-3);
}

TEST_F(TrainerOnSim, Pipelines) {
  std::vector<Layout> layouts;
  for (const std::string name :
       {"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}) {
    layouts.push_back({.name = name, .ranks = 2, .pp = 2, .keys = schedule(name)});
    std::vector<std::string> keys = sharded(3, 2);
    keys.insert(keys.end(), {schedule(name)[0], "--activation_checkpoint.mode=full"});
    layouts.push_back({.name = name + "_zero3_recomputed", .ranks = 4, .pp = 2, .keys = keys});
  }
  for (const Layout& layout : sampled(layouts, 2)) expect_losses_of_the_cpu(layout);
}
TEST_F(TrainerOnSim, Mixes) {
  const std::vector<Layout> layouts = {{.name = "tp_zero3", .ranks = 4, .tp = 2, .keys = sharded(3, 2)},
                                       {.name = "all", .ranks = 8, .tp = 2, .pp = 2, .keys = sharded(3, 2)}};
  for (const Layout& layout : sampled(layouts, 1)) expect_losses_of_the_cpu(layout);
}
// Rows find their experts on other devices, and their way back.
TEST_F(TrainerOnSim, ExpertsDividedAmongRanks) {
  const auto experts = [&](std::vector<std::string> keys) {
    const std::vector<std::string> model = mixture();
    keys.insert(keys.end(), model.begin(), model.end());
    keys.emplace_back("--parallelism.expert_parallel_degree=2");
    return keys;
  };
  const std::vector<Layout> layouts = {{.name = "ep", .ranks = 2, .keys = experts(sharded(3, 2))},
                                       {.name = "ep_zero3", .ranks = 4, .keys = experts(sharded(3, 4))},
                                       {.name = "ep_tp", .ranks = 4, .tp = 2, .keys = experts(sharded(3, 2))}};
  for (const Layout& layout : sampled(layouts, 1)) expect_losses_of_the_cpu(layout);
}

// In bfloat16 the experts of a rank are grouped products.
TEST_F(TrainerOnSim, GroupedExpertsInSixteenBits) {
  const auto experts = [&](std::vector<std::string> keys, int expert_degree = 1) {
    const std::vector<std::string> model = mixture();
    keys.insert(keys.end(), model.begin(), model.end());
    keys.emplace_back("--training.mixed_precision_param=bfloat16");
    keys.push_back(fmt::format("--parallelism.expert_parallel_degree={}", expert_degree));
    return keys;
  };
  const std::vector<std::string> recomputed = {"--activation_checkpoint.mode=full"};
  const std::vector<Layout> layouts = {{.name = "ddp", .ranks = 2, .keys = experts({})},
                                       {.name = "ddp_recomputed", .ranks = 2, .keys = experts(recomputed)},
                                       {.name = "zero2", .ranks = 2, .keys = experts(sharded(2, 2))},
                                       {.name = "zero3", .ranks = 2, .keys = experts(sharded(3, 2))},
                                       {.name = "pp", .ranks = 2, .pp = 2, .keys = experts({})},
                                       {.name = "zbv",  // weight gradients are deferred, but those of experts
                                        .ranks = 2,
                                        .pp = 2,
                                        .keys = experts(schedule("ZBVZeroBubble"))},
                                       {.name = "ep", .ranks = 2, .keys = experts(sharded(3, 2), 2)},
                                       {.name = "ep_zero3", .ranks = 4, .keys = experts(sharded(3, 4), 2)}};
  for (const Layout& layout : sampled(layouts, 2)) {
    sim_.runtime.clear_launches();
    // 16 bits are rounded at other places.
    expect_losses_of_the_cpu(layout, 1e-3);
    EXPECT_GT(sim_.runtime.launches_by_kernel()["aten::_grouped_mm"], 0U) << layout.name;
  }
}

// Biases are moved on the device, by exact counts, and not in steps that are skipped there.
TEST_F(TrainerOnSim, BiasesOfExpertsAreThoseOfTheCpu) {
  const auto experts = [&](std::vector<std::string> keys) {
    const std::vector<std::string> model = mixture();
    keys.insert(keys.end(), model.begin(), model.end());
    keys.insert(keys.end(), {"--training.moe_router_enable_expert_bias", "--training.moe_z_loss_coeff=0.1"});
    return keys;
  };
  const auto expect_same_biases = [&](const std::string& name) {
    const at::Tensor expected = expert_biases_of(path(name + "_cpu"), {0, 1});
    EXPECT_GT(expected.abs().max().item<double>(), 1e-3);
    for (const char* backend : {"_staged", "_nccl"}) {
      EXPECT_TRUE(at::equal(expert_biases_of(path(name + backend), {0, 1}), expected)) << name << backend;
    }
  };
  const std::vector<Layout> layouts = {{.name = "ddp", .ranks = 2, .keys = experts({})},
                                       {.name = "pp_zero3", .ranks = 4, .pp = 2, .keys = experts(sharded(3, 2))}};
  for (const Layout& layout : sampled(layouts, 1)) {
    expect_losses_of_the_cpu(layout);
    expect_same_biases(layout.name);
  }

  const Layout skips{
      .name = "skips",
      .keys = experts({"--training.mixed_precision_param=float16", "--training.initial_loss_scale=1e30"})};
  losses_on_sim(config_of(skips, "skips"), "skips", 1, /*over_nccl=*/false);
  EXPECT_EQ(expert_biases_of(path("skips"), {0, 1}).abs().max().item<double>(), 0);
}

// Latent attention, layers with and without experts, a net beside experts.
TEST_F(TrainerOnSim, DeepSeek) { expect_losses_of_a_family("deepseek_v3"); }

// Sinks, windows in every second layer, biases of experts.
TEST_F(TrainerOnSim, GptOss) { expect_losses_of_a_family("gpt_oss"); }

TEST_F(TrainerOnSim, CutSequences) {
  const std::string heads = "--parallelism.context_parallel_exchange=heads",
                    ring = "--parallelism.context_parallel_exchange=ring";
  // Five of six layers have a window of half the sequence.
  const std::vector<std::string> windows = {ring, "--model.name=gemma3_text", "--training.seq_len=64"};
  const std::vector<Layout> layouts = {
      {.name = "cp", .ranks = 2, .cp = 2},
      {.name = "cp_heads", .ranks = 2, .keys = {heads}, .cp = 2},
      {.name = "cp_zero3_tp", .ranks = 4, .tp = 2, .keys = sharded(3), .cp = 2},
      {.name = "ring3", .ranks = 3, .keys = {ring}, .cp = 3},
      {.name = "ring4_zero3",
       .ranks = 4,
       .keys = {ring, "--parallelism.data_parallel_shard_degree=-1", "--activation_checkpoint.mode=full"},
       .cp = 4},
      {.name = "ring_windows", .ranks = 4, .keys = windows, .cp = 4}};
  for (const Layout& layout : sampled(layouts, 1)) expect_losses_of_the_cpu(layout);
  std::vector<std::string> narrow = windows;
  narrow.emplace_back("--training.mixed_precision_param=bfloat16");
  const std::vector<Layout> of_16_bits = {
      {.name = "ring4_bf16", .ranks = 4, .keys = {ring, "--training.mixed_precision_param=bfloat16"}, .cp = 4},
      {.name = "ring_windows_bf16", .ranks = 4, .keys = narrow, .cp = 4}};
  for (const Layout& layout : sampled(of_16_bits, 1)) expect_losses_of_the_cpu(layout, 1e-3);
}
TEST_F(TrainerOnSim, Offloaded) {
  const char *const to_device = "copy_ (host to device)", *const to_host = "copy_ (device to host)";
  const auto copies_on_compute_streams = [&](const Layout& layout, const char* copy) {
    std::uint64_t copies = 0;
    for (int device = 0; device < layout.ranks; ++device) {
      copies += sim_.runtime.launches_by_kernel({device, 0})[copy];
    }
    return copies;
  };
  const std::vector<Layout> layouts = {
      {.name = "zero3", .ranks = 2, .keys = sharded(3)},
      {.name = "zero2", .ranks = 2, .keys = sharded(2)},
      {.name = "hsdp", .ranks = 4, .keys = sharded(3, 2)},
      {.name = "accumulated", .ranks = 2, .keys = {sharded(3)[0], "--training.local_batch_size=1"}},
      {.name = "accumulated_hsdp", .ranks = 4, .keys = {sharded(3, 2)[0], "--training.local_batch_size=1"}}};
  for (const Layout& layout : sampled(layouts, 2)) {
    sim_.runtime.clear_launches();
    expect_losses_of_the_cpu(layout);
    const std::uint64_t batches = copies_on_compute_streams(layout, to_device);
    Layout offloaded = layout;
    offloaded.name += "_offloaded";
    offloaded.keys.emplace_back("--training.enable_cpu_offload");
    sim_.runtime.clear_launches();
    expect_losses_of_the_cpu(offloaded);
    // Streams that compute copy batches and figures. Weights and gradients have streams of their own.
    EXPECT_EQ(copies_on_compute_streams(offloaded, to_device), batches) << layout.name;
    EXPECT_GT(sim_.runtime.launches_by_kernel()[to_device], batches) << layout.name;
    EXPECT_LT(4 * copies_on_compute_streams(offloaded, to_host), sim_.runtime.launches_by_kernel()[to_host])
        << layout.name;
  }
}
TEST_F(TrainerOnSim, RecomputedAndAccumulated) {
  expect_losses_of_the_cpu({.name = "recomputed", .keys = {"--activation_checkpoint.mode=full"}});
  expect_losses_of_the_cpu({.name = "accumulated",
                            .ranks = 2,
                            .keys = {"--parallelism.data_parallel_shard_degree=2", "--training.local_batch_size=1"}});
}
TEST_F(TrainerOnSim, SixteenBits) {
  expect_losses_of_the_cpu(
      {.name = "bf16",
       .ranks = 2,
       .keys = {"--parallelism.data_parallel_shard_degree=2", "--training.mixed_precision_param=bfloat16"}},
      1e-3);
}

// Products of float8 numbers with the checks that CUDA has. A rounding of 16 bits at another place may change one of 8.
TEST_F(TrainerOnSim, Float8) {
  for (const std::string recipe : {"tensorwise", "rowwise"}) {
    const auto float8 = [&](std::vector<std::string> keys = {}) {
      keys.insert(keys.end(),
                  {"--model.ffn_hidden=192", "--training.mixed_precision_param=bfloat16",
                   "--model.converters=quantize.linear.float8", "--quantize.linear.float8.recipe_name=" + recipe});
      return keys;
    };
    const std::vector<Layout> layouts = {
        {.name = "one_" + recipe, .keys = float8()},
        {.name = "zero3_" + recipe, .ranks = 2, .keys = float8(sharded(3))},
        {.name = "tp_" + recipe, .ranks = 2, .tp = 2, .keys = float8()},
        {.name = "zbv_" + recipe, .ranks = 2, .pp = 2, .keys = float8(schedule("ZBVZeroBubble"))}};
    for (const Layout& layout : sampled(layouts, 1)) expect_losses_of_the_cpu(layout, kFloat8);
  }
}

// As an export reads them: gathered one by one, so that the device of rank 0 never holds the whole model.
TEST_F(TrainerOnSim, WholeWeightsOfAShardedModelAreOnTheHost) {
  const config::TrainConfig config = config_of({.name = "whole", .ranks = 2, .keys = sharded(3)}, "whole");
  run_sim_ranks(2, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
    const at::Device device = sim_device::SimBackend::device(world->rank());
    const auto model = make_parallel_model(config, config::plan_run(config, 2), world, device);
    model->initialise(1);
    model->values_were_loaded();
    const std::size_t before = sim_.memory.stats(device.index()).allocated;
    sim_.memory.reset_peaks(device.index());
    const std::vector<NamedTensor> whole = model->full_weights_on_rank0();
    EXPECT_EQ(whole.empty(), world->rank() != 0);
    std::size_t largest = 0, all = 0;
    for (const NamedTensor& one : whole) {
      EXPECT_TRUE(one.tensor.device().is_cpu()) << one.name;
      largest = std::max(largest, one.tensor.nbytes());
      all += one.tensor.nbytes();
    }
    if (world->rank() != 0) return;
    const std::size_t gathered = sim_.memory.stats(device.index()).peak_allocated - before;
    EXPECT_GE(gathered, largest);
    EXPECT_LT(gathered, 2 * largest) << "of " << all;
    EXPECT_GT(all, 3 * largest) << "or the test says nothing";
  });
}

// The second half of a run, from the checkpoint that was saved asynchronously in its middle, has the same losses.
TEST_F(TrainerOnSim, AsynchronousCheckpointsResumeBitForBit) {
  const std::vector<std::string> keys = {"--training.steps=6", "--validation.no-enable", "--checkpoint.interval=3",
                                         "--checkpoint.async_mode=async"};
  const auto config_for = [&](const std::string& run) {
    return config_of({.name = run, .ranks = 2, .keys = sharded(3)}, run, keys);
  };
  const std::vector<double> whole = losses_on_sim(config_for("whole"), "whole", 2, /*over_nccl=*/true);
  ASSERT_EQ(whole.size(), 6);
  std::filesystem::create_directories(path("resumed") + "/checkpoint");
  std::filesystem::copy(path("whole") + "/checkpoint/step-3", path("resumed") + "/checkpoint/step-3");
  const std::vector<double> half = losses_on_sim(config_for("resumed"), "resumed", 2, /*over_nccl=*/true);
  EXPECT_EQ(half, std::vector<double>(whole.begin() + 3, whole.end()));
}

}  // namespace
}  // namespace phalanx::train
