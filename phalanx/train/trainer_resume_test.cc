// A run resumes from a checkpoint: on the same layout with the same bits, on any other layout with the same losses.
#include <iterator>

#include "phalanx/base/file.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

constexpr int kHalf = 3;

class TrainerResumeTest : public TrainerTest {
 protected:
  /// Runs both halves of a run without a stop; each leaves a checkpoint.
  Weights run_both_halves(const Layout& layout) { return train(config_in_halves(layout, layout.name), layout.ranks); }

  /// Runs only the second half, in a folder that holds only what run_both_halves(from) saved in its middle.
  Weights run_second_half(const Layout& from, const Layout& to, const std::string& run) {
    const std::string step = "/checkpoint/step-" + std::to_string(kHalf);
    std::filesystem::create_directories(path(run) + "/checkpoint");
    std::filesystem::copy(path(from.name) + step, path(run) + step);
    Weights weights = train(config_in_halves(to, run), to.ranks);
    EXPECT_EQ(result_.step, 2 * kHalf);
    EXPECT_EQ(losses(run).size(), kHalf);
    return weights;
  }

  /// The lines of the second half in metrics.jsonl.
  std::vector<double> second_half(const std::string& run, const std::string& key) const {
    std::vector<double> values;
    for (const auto& line : lines_with(run, key)) {
      if (line["step"].get<int>() > kHalf) values.push_back(line[key].get<double>());
    }
    return values;
  }

  /// Name and bytes of every file of the last checkpoint: weights, optimizer state, integers, which rank saved which
  /// part.
  std::map<std::string, std::string> files_at_the_end(const std::string& run) const {
    std::map<std::string, std::string> files;
    for (const auto& entry :
         std::filesystem::directory_iterator(path(run) + "/checkpoint/step-" + std::to_string(2 * kHalf))) {
      files[entry.path().filename().string()] = read_file(entry.path());
    }
    return files;
  }

 private:
  config::TrainConfig config_in_halves(const Layout& layout, const std::string& run) const {
    return config_of(layout, run,
                     {"--training.steps=" + std::to_string(2 * kHalf), "--validation.no-enable",
                      "--checkpoint.interval=" + std::to_string(kHalf)});
  }
};

TEST_F(TrainerResumeTest, OnTheSameLayoutEveryBitIsThatOfARunThatNeverStopped) {
  const std::string shards = "--parallelism.data_parallel_shard_degree=", stage = "--parallelism.zero_stage=",
                    schedule = "--parallelism.pipeline_parallel_schedule=", batch = "--training.local_batch_size=",
                    recompute = "--activation_checkpoint.mode=", half = "--training.mixed_precision_param=";
  const std::string async = "--checkpoint.async_mode=async", tied = "--model.tie_embeddings";
  const std::vector<Layout> layouts = {
      {.name = "zero1", .ranks = 2, .keys = sharded(1)},
      {.name = "zero2", .ranks = 2, .keys = sharded(2)},
      {.name = "zero3_of_3", .ranks = 3, .keys = {shards + "3", "--training.global_batch_size=6", batch + "2"}},
      {.name = "hsdp", .ranks = 4, .keys = sharded(3, 2)},
      {.name = "groups", .ranks = 4, .keys = {shards + "4", "--parallelism.fsdp_reshard_after_forward=2"}},
      {.name = "tp", .ranks = 2, .tp = 2},
      {.name = "tp_whole_tokens", .ranks = 2, .tp = 2, .keys = {"--parallelism.no-enable_sequence_parallel"}},
      {.name = "zero3_tp", .ranks = 4, .tp = 2, .keys = {shards + "2", async}},
      {.name = "pp", .ranks = 2, .pp = 2, .keys = {async}},
      {.name = "pp_interleaved", .ranks = 2, .pp = 2, .keys = {schedule + "Interleaved1F1B"}},
      {.name = "pp_zero1_zbv", .ranks = 4, .pp = 2, .keys = {shards + "2", stage + "1", schedule + "ZBVZeroBubble"}},
      {.name = "pp_zero3_tied", .ranks = 4, .pp = 2, .keys = {shards + "2", tied}},
      {.name = "pp_tp", .ranks = 4, .tp = 2, .pp = 2},
      {.name = "pp_tp_zero3", .ranks = 8, .tp = 2, .pp = 2, .keys = {shards + "2"}},
      {.name = "offloaded", .ranks = 2, .keys = {shards + "2", "--training.enable_cpu_offload", async}},
      {.name = "accumulated_recomputed", .ranks = 2, .keys = {shards + "2", batch + "1", recompute + "full"}},
      {.name = "recomputed_by_operation",
       .ranks = 2,
       .keys = {shards + "2", recompute + "selective", "--activation_checkpoint.selective_ac_option=op"}},
      {.name = "bfloat16",
       .ranks = 2,
       .keys = {shards + "2", half + "bfloat16", "--training.mixed_precision_reduce=bfloat16"}},
      {.name = "float16_pp", .ranks = 2, .pp = 2, .keys = {half + "float16", "--training.loss_scale_window=2"}},
  };
  for (const Layout& layout : sampled(layouts, 6)) {
    SCOPED_TRACE(layout.name);
    const std::string resumed = layout.name + "_resumed";
    const Weights expected = run_both_halves(layout);
    EXPECT_EQ(run_second_half(layout, layout, resumed), expected);
    for (const char* figure : {"loss", "grad_norm", "loss_scale"}) {
      EXPECT_EQ(values_of(resumed, figure), second_half(layout.name, figure)) << figure;
    }
    const auto files = files_at_the_end(resumed), expected_files = files_at_the_end(layout.name);
    EXPECT_EQ(files.size(), static_cast<std::size_t>(layout.ranks) + 1);  // of each rank, and the manifest
    for (const auto& [name, bytes] : expected_files) {
      ASSERT_TRUE(files.contains(name)) << name;
      EXPECT_TRUE(files.at(name) == bytes) << name << " of the checkpoint at the end is another";
    }
  }
}

TEST_F(TrainerResumeTest, OnAnyOtherLayoutTheLossesAreThoseOfARunThatNeverStopped) {
  const std::vector<Layout> all = {{.name = "one"},
                                   {.name = "ddp", .ranks = 2},
                                   {.name = "zero1", .ranks = 4, .keys = sharded(1)},
                                   {.name = "zero2", .ranks = 2, .keys = sharded(2)},
                                   {.name = "zero3", .ranks = 8, .keys = sharded(3)},
                                   {.name = "hsdp", .ranks = 4, .keys = sharded(3, 2)},
                                   {.name = "tp", .ranks = 2, .tp = 2},
                                   {.name = "zero3_tp", .ranks = 4, .tp = 2, .keys = sharded(3)},
                                   {.name = "pp", .ranks = 2, .pp = 2},
                                   {.name = "pp_zero3", .ranks = 4, .pp = 2, .keys = sharded(3)},
                                   {.name = "pp_tp", .ranks = 4, .tp = 2, .pp = 2}};
  const std::vector<Layout> layouts = first_and_sampled(all, 4);
  for (const Layout& layout : layouts) run_both_halves(layout);
  const auto expected = second_half("one", "loss");
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    for (const std::size_t further : sampled(std::vector<std::size_t>{1, 4, 7}, 1)) {
      const Layout &from = layouts[i], &to = layouts[(i + further) % layouts.size()];
      const std::string run = from.name + "_to_" + to.name;
      SCOPED_TRACE(run);
      run_second_half(from, to, run);
      expect_same_losses(losses(run), expected);
    }
  }
}

}  // namespace
}  // namespace phalanx::train
