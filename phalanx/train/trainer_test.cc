#include "phalanx/train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/comm/local.h"
#include "phalanx/models/llama_config.h"
#include "phalanx/nn/init.h"
#include "phalanx/train/config_schema.h"
#include "phalanx/train/model_config.h"

namespace phalanx::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Weights = std::map<std::string, std::string>;  // name -> bytes

class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest() {
    // Text with something to learn: a token follows from the one before, with noise from a small generator.
    std::vector<std::uint16_t> tokens;
    std::uint32_t state = 1;
    for (int i = 0; i < 6000; ++i) {
      state = state * 1664525U + 1013904223U;
      const std::uint32_t noise = state >> 24;
      tokens.push_back(noise < 40 || tokens.empty() ? noise % 512
                                                    : static_cast<std::uint16_t>((tokens.back() * 7 + 3) % 512));
    }
    std::ofstream file(path("tokens.bin"), std::ios::binary);
    file.write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(2 * tokens.size()));
  }

  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }

  TrainConfig config(const std::string& run, std::vector<std::string> more = {}) const {
    std::vector<std::string> flags = {"--model.flavor=debug",
                                      "--training.dataset_path=" + path("tokens.bin"),
                                      "--training.seq_len=32",
                                      "--training.local_batch_size=4",
                                      "--training.global_batch_size=8",
                                      "--training.steps=12",
                                      "--lr_scheduler.warmup_steps=2",
                                      "--optimizer.lr=3e-3",
                                      "--validation.enable",
                                      "--validation.freq=6",
                                      "--metrics.no-enable_tensorboard",
                                      "--checkpoint.interval=100",
                                      "--job.dump_folder=" + path(run)};
    flags.insert(flags.end(), more.begin(), more.end());
    return parse_config("", "test", flags);
  }

  /// Trains on `ranks` threads; returns rank 0's final weights, and checks that the other ranks have the same.
  Weights train(const TrainConfig& config, int ranks, std::function<bool(int rank)> stop = {}) {
    std::vector<Weights> weights(static_cast<std::size_t>(ranks));
    run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      const int rank = world->rank();
      Trainer trainer(config,
                      {.world = world, .stop_requested = [&stop, rank] { return stop && stop(rank); }, .quiet = true});
      const TrainResult result = trainer.run();
      if (rank == 0) result_ = result;
      for (const auto& [name, tensor] : nn::named_parameters(trainer.model())) {
        weights[static_cast<std::size_t>(rank)][name] =
            std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
      }
    });
    for (const Weights& other : weights) EXPECT_EQ(other, weights[0]);
    return weights[0];
  }

  std::vector<double> losses(const std::string& run) const {
    std::ifstream file(path(run) + "/metrics.jsonl");
    std::vector<double> values;
    for (std::string line; std::getline(file, line);) {
      const auto entry = nlohmann::json::parse(line);
      if (entry.contains("loss")) values.push_back(entry["loss"].get<double>());
    }
    return values;
  }

  template <class E>
  std::string refusal(const TrainConfig& config, int ranks = 1) {
    try {
      train(config, ranks);
    } catch (const E& error) {
      return error.what();
    }
    return "accepted";
  }

  TempDirectory folder_;
  TrainResult result_;
};

TEST_F(TrainerTest, LearnsAndValidates) {
  train(config("run", {"--training.steps=60"}), 1);
  const auto values = losses("run");
  ASSERT_EQ(values.size(), 60U);
  EXPECT_NEAR(values[0], std::log(512.0), 0.3);
  EXPECT_LT(values.back(), values[0] - 1.0);
  ASSERT_TRUE(result_.validation_loss.has_value());
  EXPECT_LT(*result_.validation_loss, *result_.unigram_entropy);
  const auto run = nlohmann::json::parse(std::ifstream(path("run") + "/run.json"));
  EXPECT_EQ(run["status"], "finished");
  EXPECT_EQ(run["pss_mib"].size(), 1U);
  // The effective configuration in run.json is one that reads back.
  EXPECT_EQ(parse_config(run["config"].get<std::string>(), "run.json", {}).model.dim, 64);
}

TEST_F(TrainerTest, AResumedRunHasTheSameBitsAsOneThatNeverStopped) {
  for (const int ranks : {1, 2}) {
    const std::string name = std::to_string(ranks);
    const Weights whole = train(config("whole" + name), ranks);
    train(config("parts" + name, {"--training.steps=12", "--checkpoint.interval=5"}), ranks,
          [asked = std::make_shared<std::atomic<int>>(0), ranks](int) { return asked->fetch_add(1) / ranks >= 4; });
    EXPECT_TRUE(result_.stopped);
    EXPECT_EQ(result_.step, 5);
    const Weights parts = train(config("parts" + name), ranks);
    EXPECT_EQ(result_.step, 12);
    EXPECT_EQ(parts, whole);
    EXPECT_EQ(losses("parts" + name), losses("whole" + name));
  }
}

TEST_F(TrainerTest, TheNumberOfRanksAndOfAccumulatedPartsDoesNotChangeTheRun) {
  train(config("one"), 1);
  train(config("two"), 2);
  train(config("four", {"--training.local_batch_size=1"}), 4);
  const auto one = losses("one"), two = losses("two"), four = losses("four");
  ASSERT_EQ(one.size(), 12U);
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_NEAR(two[i], one[i], 1e-5 * one[i]);
    EXPECT_NEAR(four[i], one[i], 1e-5 * one[i]);
  }
}

TEST_F(TrainerTest, AnyRanksWishToStopStopsAllAfterTheSameStepAndSaves) {
  train(config("run"), 2, [](int rank) { return rank == 1; });
  EXPECT_TRUE(result_.stopped);
  EXPECT_EQ(result_.step, 1);
  EXPECT_TRUE(std::filesystem::exists(path("run") + "/checkpoint/step-1/manifest.json"));
}

TEST_F(TrainerTest, ALossThatIsNotFiniteEndsTheRunNamingTheStep) {
  EXPECT_THAT(refusal<Error>(config("run", {"--optimizer.lr=1e30", "--training.max_norm=0",
                                            "--lr_scheduler.warmup_steps=0", "--optimizer.name=SGD"})),
              AllOf(HasSubstr("step "), HasSubstr("learning rate")));
}

TEST_F(TrainerTest, TrainsInBfloat16) {
  train(config("run", {"--training.mixed_precision_param=bfloat16", "--training.steps=40"}), 1);
  const auto values = losses("run");
  EXPECT_LT(values.back(), values[0] - 0.7);
}

TEST_F(TrainerTest, WritesWeightsWithHuggingFaceNamesThatStartAnotherRun) {
  const Weights before = train(config("first", {"--checkpoint.last_save_in_hf"}), 1);
  // A run of one step with a learning rate of zero keeps what it loaded.
  const Weights after =
      train(config("second", {"--checkpoint.initial_load_path=" + path("first") + "/hf",
                              "--checkpoint.initial_load_in_hf", "--training.steps=1", "--optimizer.lr=0"}),
            1);
  EXPECT_EQ(before, after);
}

TEST_F(TrainerTest, UserErrorsAreNamed) {
  EXPECT_THAT(refusal<ConfigError>(config("run", {"--training.dataset_path="})), HasSubstr("dataset_path is not set"));
  EXPECT_THAT(refusal<Error>(config("run", {"--training.dataset_path=/nonexistent.bin"})),
              HasSubstr("/nonexistent.bin"));
  EXPECT_THAT(refusal<ConfigError>(config("run", {"--training.global_batch_size=7"})),
              HasSubstr("global_batch_size 7 is not a multiple"));
  EXPECT_THAT(refusal<ConfigError>(config("run", {"--model.n_kv_heads=3"})), HasSubstr("n_kv_heads"));
  EXPECT_THAT(refusal<CheckpointError>(config("run", {"--checkpoint.initial_load_path=/nonexistent"})),
              HasSubstr("/nonexistent"));
}

TEST(ModelConfig, ExplicitKeysChangeTheFlavor) {
  const TrainConfig config = with_model_numbers(parse_config("[model]\nflavor = \"5M\"\nn_layers = 7\n", "test", {}));
  EXPECT_EQ(config.model.dim, 256);
  EXPECT_EQ(config.model.n_layers, 7);
  EXPECT_EQ(config.model.vocab_size, 4096);
}

TEST(ModelConfig, TheConfigurationKnowsEveryFlavor) {
  for (const Key& key : known_keys()) {
    if (key.section != "model" || key.name != "flavor") continue;
    EXPECT_EQ(std::vector<std::string>(key.choices.begin(), key.choices.end()), models::llama_flavor_names());
  }
}

}  // namespace
}  // namespace phalanx::train
