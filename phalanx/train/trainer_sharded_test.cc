// Training with sharded state: the same run as with whole models.
#include <iterator>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/files/hf_model.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class TrainerShardedTest : public TrainerTest {};

TEST_F(TrainerShardedTest, EveryStageIsTheRunThatDataParallelismIs) {
  const std::vector<std::string> parts = {"--training.local_batch_size=2", "--training.global_batch_size=8"};
  for (const bool accumulates : {false, true}) {
    const std::string suffix = accumulates ? "-accumulated" : "";
    const auto keys = accumulates ? parts : std::vector<std::string>{};
    const std::vector<std::string> once = {"--parallelism.fsdp_reduce_each_microbatch=never"};
    const Weights ddp = train(config("ddp" + suffix, keys), 2);
    const double validation = result_.validation_loss.value();
    for (const int stage : {1, 2, 3}) {
      SCOPED_TRACE(std::to_string(stage) + suffix);
      const std::string name = "zero-" + std::to_string(stage) + suffix;
      const auto more = accumulates && stage > 1 ? once : std::vector<std::string>{};
      EXPECT_EQ(train(config(name, keys + sharded(stage) + more), 2), ddp);
      EXPECT_EQ(losses(name), losses("ddp" + suffix));
      EXPECT_EQ(values_of(name, "grad_norm"), values_of("ddp" + suffix, "grad_norm"));
      EXPECT_EQ(result_.validation_loss.value(), validation);
    }
  }
}

// The order of the sum over micro-batches and ranks differs from data parallelism's.
TEST_F(TrainerShardedTest, GradientsReducedInEveryMicroBatchAreThatRunWithinRounding) {
  const std::vector<std::string> parts = {"--training.local_batch_size=1", "--training.global_batch_size=8"};
  train(config("ddp", parts), 2);
  const Weights two = train(config("zero-2", parts + sharded(2)), 2);
  const Weights three = train(config("zero-3", parts + sharded(3)), 2);
  EXPECT_EQ(two, three);
  EXPECT_EQ(losses("zero-2"), losses("zero-3"));
  expect_same_losses(losses("zero-3"), losses("ddp"));
  EXPECT_NE(values_of("zero-3", "grad_norm"), values_of("ddp", "grad_norm"));
  const auto hsdp = parts + sharded(3, 2);
  train(config("hsdp", hsdp), 4);
  expect_same_losses(losses("hsdp"), losses("ddp"));
}

TEST_F(TrainerShardedTest, RecomputedActivationsChangeNothing) {
  for (const auto& layout :
       {Layout{.name = "ddp", .ranks = 2}, Layout{.name = "zero-3", .ranks = 2, .keys = sharded(3)}}) {
    const Weights plain = train(config(layout.name, layout.keys), 2);
    for (const std::string mode : {"full", "selective", "selective --activation_checkpoint.selective_ac_option=op"}) {
      const std::string name = layout.name + mode;
      std::vector<std::string> keys = layout.keys;
      const std::size_t space = mode.find(' ');
      keys.push_back("--activation_checkpoint.mode=" + mode.substr(0, space));
      if (space != std::string::npos) keys.push_back(mode.substr(space + 1));
      EXPECT_EQ(train(config(name, keys), 2), plain);
      EXPECT_EQ(losses(name), losses(layout.name));
    }
  }
}

TEST_F(TrainerShardedTest, CheckpointsWrittenWhileTrainingGoesOnAreThoseOfTheirSteps) {
  for (const auto& layout :
       {Layout{.name = "ddp", .ranks = 2}, Layout{.name = "zero-3", .ranks = 2, .keys = sharded(3)}}) {
    const auto keys = layout.keys + std::vector<std::string>{"--checkpoint.interval=3"};
    train(config(layout.name, keys), 2);
    const std::string name = layout.name + "-async";
    const auto async_keys = keys + std::vector<std::string>{"--checkpoint.async_mode=async"};
    train(config(name, async_keys), 2);
    EXPECT_EQ(checkpoints_of(name), checkpoints_of(layout.name));
    for (const int step : {3, 6, 9, 12}) {
      const std::string in_step = "/checkpoint/step-" + std::to_string(step);
      for (const std::string file : {"shard-00001-model-00001-of-00001.safetensors",
                                     "shard-00002-model-00001-of-00001.safetensors", "manifest.json"}) {
        const auto bytes_of = [&](const std::string& run) {
          std::string bytes = read_file(path(run) + in_step + "/" + file);
          if (file != "manifest.json") return bytes;
          auto manifest = nlohmann::json::parse(bytes);  // of two runs, which have an id each
          EXPECT_EQ(manifest["metadata"]["run"].erase("id"), 1U);
          manifest.erase("checksum");
          return manifest.dump();
        };
        EXPECT_EQ(bytes_of(name), bytes_of(layout.name)) << step << " " << file;
        EXPECT_GT(bytes_of(name).size(), 100U);
      }
    }
    train(config(name, async_keys + std::vector<std::string>{"--training.steps=13"}), 2);  // and it goes on from there
    EXPECT_EQ(result_.step, 13);
    EXPECT_EQ(losses(name).size(), 13U);
  }
}

TEST_F(TrainerShardedTest, WholeWeightsAreWrittenForOthers) {
  train(config("ddp", {"--checkpoint.last_save_in_hf"}), 2);
  train(config("sharded", sharded(3) + std::vector<std::string>{"--checkpoint.last_save_in_hf"}), 2);
  const safetensors::File a(path("ddp") + "/hf/model.safetensors"), b(path("sharded") + "/hf/model.safetensors");
  EXPECT_EQ(a.tensors().size(), b.tensors().size());
  EXPECT_EQ(std::filesystem::file_size(path("ddp") + "/hf/model.safetensors"),
            std::filesystem::file_size(path("sharded") + "/hf/model.safetensors"));
  // So does a tool that makes them from the checkpoint.
  SavedState saved(path("sharded") + "/checkpoint/step-12");
  consolidate_for_hf(saved, path("consolidated") + "/hf");
  EXPECT_EQ(read_file(path("consolidated") + "/hf/config.json"), read_file(path("sharded") + "/hf/config.json"));
  // A new run may start from them, in its own layout.
  const auto from_file = [&](const std::string& of) {
    return std::vector<std::string>{"--checkpoint.initial_load_in_hf",
                                    "--checkpoint.initial_load_path=" + path(of) + "/hf"};
  };
  const Weights trained_on = train(config("c", from_file("ddp")), 2);
  EXPECT_EQ(train(config("d", sharded(3) + from_file("sharded")), 2), trained_on);
  EXPECT_EQ(train(config("e", sharded(1) + from_file("consolidated")), 2), trained_on);
}

TEST_F(TrainerShardedTest, DegreesThatDoNotMakeTheRanksAreRefused) {
  EXPECT_THAT(refusal<ConfigError>(config("a", sharded(3, 3)), 4),
              HasSubstr("data_parallel_replicate_degree -1 x data_parallel_shard_degree 3 do not make 4 ranks"));
  EXPECT_THAT(refusal<ConfigError>(config("b", {"--parallelism.data_parallel_replicate_degree=3",
                                                "--parallelism.data_parallel_shard_degree=-1"}),
                                   4),
              HasSubstr("do not make 4 ranks"));
}

}  // namespace
}  // namespace phalanx::train
