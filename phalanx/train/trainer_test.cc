#include "phalanx/train/trainer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/process_stats.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/comm/local.h"
#include "phalanx/models/llama_config.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/lr_schedule.h"
#include "phalanx/train/autocast_guard.h"
#include "phalanx/train/config_schema.h"
#include "phalanx/train/device_info.h"
#include "phalanx/train/model_config.h"
#include "phalanx/train/run_files.h"
#include "phalanx/train/stop_signal.h"

namespace phalanx::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Weights = std::map<std::string, std::string>;  // name -> bytes

class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest() {
    // Text with something to learn: a token follows from the one before, with noise from a small generator.
    std::uint32_t state = 1;
    for (int i = 0; i < 6000; ++i) {
      state = state * 1664525U + 1013904223U;
      const std::uint32_t noise = state >> 24;
      tokens_.push_back(noise < 40 || tokens_.empty() ? noise % 512
                                                      : static_cast<std::uint16_t>((tokens_.back() * 7 + 3) % 512));
    }
    write_tokens("tokens.bin", tokens_);
  }

  void write_tokens(const std::string& name, const std::vector<std::uint16_t>& tokens) const {
    std::ofstream file(path(name), std::ios::binary);
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

  /// Lines of metrics.jsonl that have this key.
  std::vector<nlohmann::json> lines_with(const std::string& run, const std::string& key) const {
    std::ifstream file(path(run) + "/metrics.jsonl");
    std::vector<nlohmann::json> entries;
    for (std::string line; std::getline(file, line);) {
      auto entry = nlohmann::json::parse(line);
      if (entry.contains(key)) entries.push_back(std::move(entry));
    }
    return entries;
  }
  std::vector<double> values_of(const std::string& run, const std::string& key) const {
    std::vector<double> values;
    for (const auto& entry : lines_with(run, key)) values.push_back(entry[key].get<double>());
    return values;
  }
  std::vector<std::string> checkpoints_of(const std::string& run) const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path(run) + "/checkpoint")) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  static std::function<bool(int)> stop_after_first_step() {
    return [](int) { return true; };
  }

  TempDirectory folder_;
  std::vector<std::uint16_t> tokens_;
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

// Each key of the optimizer and the data must reach what it is about: another value, other weights.
TEST_F(TrainerTest, EveryKeyOfOptimizerAndDataCounts) {
  int runs = 0;
  const auto weights = [&](std::vector<std::string> flags) {
    const std::vector<std::string> base = {"--training.steps=2",          "--validation.no-enable",
                                           "--checkpoint.no-enable",      "--lr_scheduler.warmup_steps=1",
                                           "--training.max_norm=1000000", "--metrics.no-enable_report"};
    flags.insert(flags.begin(), base.begin(), base.end());
    return train(config("keys" + std::to_string(runs++), flags), 1);
  };
  const std::string sgd = "--optimizer.name=SGD";
  const Weights adamw = weights({}), plain = weights({sgd});
  EXPECT_EQ(adamw, weights({}));
  EXPECT_EQ(adamw, weights({"--training.max_norm=0"}));  // never scaled
  EXPECT_NE(plain, adamw);
  for (const char* flag : {"--optimizer.lr=1e-2", "--optimizer.beta1=0.5", "--optimizer.beta2=0.5",
                           "--optimizer.eps=0.1", "--optimizer.weight_decay=0.9", "--training.max_norm=0.01",
                           "--training.no-shuffle", "--model.rope_theta=100"}) {
    EXPECT_NE(weights({flag}), adamw) << flag;
  }
  for (const char* flag : {"--optimizer.momentum=0.5", "--optimizer.weight_decay=0.9", "--optimizer.lr=1e-2"}) {
    EXPECT_NE(weights({sgd, flag}), plain) << flag;
  }
}

TEST_F(TrainerTest, TheSeedIsThatOfTheWeightsAndOfTheOrderOfTheData) {
  const std::vector<std::string> one_step = {"--training.steps=1", "--optimizer.lr=0", "--validation.no-enable",
                                             "--checkpoint.last_save_in_hf"};
  const Weights zero = train(config("zero", one_step), 1);
  auto flags = one_step;
  flags.emplace_back("--debug.seed=1");
  EXPECT_NE(train(config("one", flags), 1), zero);
  // The weights of seed 0 under another order of the data: another first batch.
  flags.insert(flags.end(), {"--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path=" + path("zero/hf")});
  EXPECT_EQ(train(config("same", flags), 1), zero);
  EXPECT_NE(losses("same"), losses("zero"));
}

TEST_F(TrainerTest, AStepIsTakenAtTheRateThatIsLogged) {
  const std::vector<std::string> keys = {"--training.steps=8", "--lr_scheduler.warmup_steps=3",
                                         "--lr_scheduler.decay_ratio=0.5", "--lr_scheduler.decay_type=cosine",
                                         "--lr_scheduler.min_lr_factor=0.25"};
  const LearningRateSchedule schedule({.base_lr = 3e-3,
                                       .total_steps = 8,
                                       .warmup_steps = 3,
                                       .decay_ratio = 0.5,
                                       .decay_type = LearningRateDecay::cosine,
                                       .min_lr_factor = 0.25});
  train(config("logged", keys), 1);
  const auto rates = values_of("logged", "lr");
  ASSERT_EQ(rates.size(), 8U);
  for (std::size_t i = 0; i < rates.size(); ++i) {
    EXPECT_DOUBLE_EQ(rates[i], schedule.lr_at(static_cast<std::int64_t>(i))) << i;
  }
  // The first step of a warm-up over four is one at a quarter of the rate.
  const Weights warming =
      train(config("warming", {"--training.steps=8", "--lr_scheduler.warmup_steps=4", "--optimizer.lr=4e-3"}), 1,
            stop_after_first_step());
  const Weights constant = train(config("constant", {"--training.steps=8", "--lr_scheduler.warmup_steps=0",
                                                     "--lr_scheduler.decay_ratio=0", "--optimizer.lr=1e-3"}),
                                 1, stop_after_first_step());
  EXPECT_EQ(warming, constant);
}

TEST_F(TrainerTest, MetricsAgreeWithEachOtherAndWithTheProcess) {
  for (const int ranks : {1, 2}) {
    const std::string run = "metrics" + std::to_string(ranks);
    const double cpu_before = process_cpu_seconds();
    train(config(run), ranks);
    const double cpu_spent = process_cpu_seconds() - cpu_before;
    const auto model = model_config(config(run));
    const auto steps = lines_with(run, "loss");
    ASSERT_EQ(steps.size(), 12U);
    double cpu_of_rank_0 = 0;
    bool losses_differ = false;
    for (const auto& line : steps) {
      EXPECT_EQ(line["tokens"], 8 * 32);
      const double tps = line["tps"], tflops = line["tflops"], seconds = line["seconds"];
      EXPECT_NEAR(tps, 8.0 * 32 / ranks / seconds, 1e-6 * tps);
      EXPECT_NEAR(tflops, tps * model.flops_per_token(32) / 1e12, 1e-6 * tflops);
      EXPECT_GT(line["grad_norm"].get<double>(), 0.0);
      EXPECT_NE(line["grad_norm"], line["loss"]);
      EXPECT_LT(line["data_seconds"].get<double>(), seconds);
      ASSERT_EQ(line["memory_gib"].size(), static_cast<std::size_t>(ranks));
      EXPECT_LE(line["memory_gib"][0].get<double>(), static_cast<double>(peak_resident_bytes()) / (1 << 30));
      EXPECT_GT(line["memory_gib"][0].get<double>(), 0.25 * static_cast<double>(peak_resident_bytes()) / (1 << 30));
      cpu_of_rank_0 += line["cpu_seconds"][0].get<double>();
      EXPECT_GE(line["max_loss"].get<double>(), line["loss"].get<double>() - 1e-12);
      losses_differ = losses_differ || line["max_loss"] != line["loss"];
    }
    EXPECT_EQ(losses_differ, ranks > 1);
    EXPECT_LE(cpu_of_rank_0, cpu_spent + 0.05);
    // From the second step on the peak of the device is known.
    const double peak = 100.0 * steps[5]["tflops"].get<double>() / steps[5]["mfu_percent"].get<double>();
    const double measured = *device_peak_tflops(at::kCPU, "");
    EXPECT_GT(peak, 0.1 * measured);
    EXPECT_LT(peak, 10.0 * measured);
    const auto description = nlohmann::json::parse(std::ifstream(path(run) + "/run.json"));
    EXPECT_THAT(description["environment"]["memory"].get<std::string>(),
                ::testing::StartsWith(human_bytes(static_cast<std::uint64_t>(model.parameter_count()) * 4 * 4)));
  }
  EXPECT_GT(machine_memory_bytes(), std::uint64_t{256} << 20);
}

TEST_F(TrainerTest, SavesAndValidatesAtItsSteps) {
  const std::vector<std::string> keys = {"--checkpoint.interval=5", "--validation.freq=5"};
  train(config("all", keys), 1);
  EXPECT_THAT(checkpoints_of("all"), ::testing::ElementsAre("step-10", "step-12", "step-5"));
  EXPECT_THAT(values_of("all", "validation_loss"), ::testing::SizeIs(3));
  std::vector<int> steps;
  for (const auto& line : lines_with("all", "validation_loss")) steps.push_back(line["step"]);
  EXPECT_THAT(steps, ::testing::ElementsAre(5, 10, 12));

  train(config("two", {"--checkpoint.interval=5", "--checkpoint.keep_latest_k=2"}), 1);
  EXPECT_THAT(checkpoints_of("two"), ::testing::ElementsAre("step-10", "step-12"));

  // Back to step 5 although there are later ones.
  train(config("all", {"--checkpoint.load_step=5"}), 1, stop_after_first_step());
  EXPECT_EQ(result_.step, 6);
  EXPECT_THAT(refusal<CheckpointError>(config("all", {"--checkpoint.load_step=7"})),
              AllOf(HasSubstr("load_step is 7"), HasSubstr("complete checkpoints there: 12, 10, 6, 5")));
}

TEST_F(TrainerTest, ValidationIsTheMeanOverTheHeldOutSamplesForAnyNumberOfRanks) {
  // The last 5 %, 300 tokens: 9 samples of 32 and a label, in batches of 4, 4 and 1.
  double by_hand = 0, entropy = 0;
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    Trainer trainer(config("one"), {.world = world, .quiet = true});
    result_ = trainer.run();
    const at::NoGradGuard no_grad;
    for (int sample = 0; sample < 9; ++sample) {
      std::vector<std::int64_t> ids(tokens_.begin() + 5700 + 32 * sample, tokens_.begin() + 5700 + 32 * sample + 33);
      const at::Tensor row = at::tensor(ids, at::TensorOptions(at::kLong)).unsqueeze(0);
      by_hand += trainer.model().loss(row.narrow(1, 0, 32), row.narrow(1, 1, 32)).item<double>() / 9;
    }
  });
  std::map<std::uint16_t, double> counts;
  for (auto it = tokens_.begin() + 5700; it != tokens_.end(); ++it) counts[*it] += 1.0 / 300;
  for (const auto& [token, share] : counts) entropy -= share * std::log(share);
  EXPECT_NEAR(*result_.validation_loss, by_hand, 1e-5);
  EXPECT_NEAR(*result_.unigram_entropy, entropy, 1e-9);
  EXPECT_EQ(lines_with("one", "validation_loss").back()["tokens"], 9 * 32);
  const double one = *result_.validation_loss;
  train(config("two"), 2);
  EXPECT_NEAR(*result_.validation_loss, one, 1e-5 * one);

  train(config("some", {"--validation.steps=1", "--validation.local_batch_size=2"}), 2);
  EXPECT_EQ(lines_with("some", "validation_loss").back()["tokens"], 2 * 2 * 32);
  write_tokens("other.bin", std::vector<std::uint16_t>(200, 7));
  train(config("other", {"--validation.dataset_path=" + path("other.bin")}), 1);
  EXPECT_EQ(*result_.unigram_entropy, 0.0);
}

TEST_F(TrainerTest, HeldOutTokensAreNotTrainedOn) {
  auto tokens = tokens_;
  for (auto& token : tokens) token %= 500;
  std::fill(tokens.end() - 300, tokens.end(), std::uint16_t{511});
  write_tokens("tokens.bin", tokens);
  const std::vector<std::string> keys = {"--training.steps=30", "--optimizer.weight_decay=0"};  // more than an epoch
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    Trainer trainer(config("run", keys), {.world = world, .quiet = true});
    const at::Tensor& embeddings = trainer.model().tok_embeddings->weight;
    const at::Tensor before = embeddings.detach().clone();
    trainer.run();
    EXPECT_TRUE(embeddings[511].equal(before[511]));
    EXPECT_FALSE(embeddings[7].equal(before[7]));
  });
}

TEST_F(TrainerTest, AStoppedRunSaysSoAndKeepsWhatItSaidBefore) {
  train(config("run"), 1, stop_after_first_step());
  const std::string file = path("run") + "/run.json";
  auto run = nlohmann::json::parse(std::ifstream(file));
  EXPECT_EQ(run["status"], "stopped");
  run["note"] = "kept";
  std::ofstream(file) << run.dump();
  train(config("run"), 1);
  run = nlohmann::json::parse(std::ifstream(file));
  EXPECT_EQ(run["status"], "finished");
  EXPECT_EQ(run["note"], "kept");
  // A wish that comes with the last step stops nothing.
  train(config("one", {"--training.steps=1"}), 1, stop_after_first_step());
  EXPECT_FALSE(result_.stopped);
}

TEST_F(TrainerTest, AnotherSeedOrGlobalBatchOnResumeIsWarnedOf) {
  train(config("run"), 1, stop_after_first_step());
  ::testing::internal::CaptureStderr();
  train(config("run", {"--debug.seed=5", "--training.global_batch_size=16"}), 1);
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("the checkpoint's run had debug.seed 0, this one has 5"));
  EXPECT_THAT(text, HasSubstr("had read 8 sequences in 1 steps, this one would have read 16"));
  ::testing::internal::CaptureStderr();
  train(config("run", {"--debug.seed=5", "--training.global_batch_size=16", "--training.steps=13"}), 1);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), ::testing::Not(HasSubstr("the checkpoint's run had")));
}

TEST_F(TrainerTest, AGradientThatIsNotFiniteEndsTheRunBeforeItIsUsed) {
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    Trainer trainer(config("run"), {.world = world, .quiet = true});
    trainer.model().output->weight.register_hook([](const at::Tensor& grad) { return grad.mul(NAN); });
    const at::Tensor before = trainer.model().output->weight.detach().clone();
    try {
      trainer.run();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("step 1: the gradient norm is "), HasSubstr("learning rate")));
    }
    EXPECT_TRUE(trainer.model().output->weight.equal(before));
  });
}

TEST_F(TrainerTest, WhatACheckpointAndAnExportSayOfTheModelIsTrue) {
  const std::vector<std::string> keys = {"--model.rope_theta=300",       "--model.norm_eps=0.001",
                                         "--model.tie_embeddings",       "--model.n_kv_heads=1",
                                         "--checkpoint.last_save_in_hf", "--training.steps=1"};
  train(config("run", keys), 1);
  const auto hf = nlohmann::json::parse(std::ifstream(path("run") + "/hf/config.json"));
  const nlohmann::json expected_hf = {
      {"hidden_size", 64},        {"intermediate_size", 176},      {"num_hidden_layers", 2},
      {"num_attention_heads", 4}, {"num_key_value_heads", 1},      {"head_dim", 16},
      {"vocab_size", 512},        {"max_position_embeddings", 32}, {"rope_theta", 300.0},
      {"rms_norm_eps", 0.001},    {"tie_word_embeddings", true},   {"model_type", "llama"}};
  for (const auto& [key, value] : expected_hf.items()) EXPECT_EQ(hf[key], value) << key;
  const auto metadata = CheckpointReader(path("run") + "/checkpoint/step-1").manifest().metadata;
  const auto model = nlohmann::json::parse(metadata)["model"];
  const nlohmann::json expected = {
      {"dim", 64},         {"n_layers", 2},     {"n_heads", 4},        {"n_kv_heads", 1},   {"ffn_hidden", 176},
      {"vocab_size", 512}, {"max_seq_len", 32}, {"rope_theta", 300.0}, {"norm_eps", 0.001}, {"tie_embeddings", true}};
  for (const auto& [key, value] : expected.items()) EXPECT_EQ(model[key], value) << key;
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

TEST_F(TrainerTest, ACheckpointFolderStandsForItsNewestStepAsInitialWeights) {
  const Weights before = train(config("first", {"--training.steps=3"}), 1);
  for (const char* place : {"/checkpoint", "/checkpoint/step-3"}) {
    const Weights after = train(config("second", {"--checkpoint.initial_load_path=" + path("first") + place,
                                                  "--checkpoint.no-enable", "--training.steps=1", "--optimizer.lr=0"}),
                                1);
    EXPECT_EQ(before, after) << place;
  }
  EXPECT_THAT(refusal<CheckpointError>(config("third", {"--checkpoint.initial_load_path=" + path("first")})),
              HasSubstr("did you mean " + path("first") + "/checkpoint?"));
}

TEST_F(TrainerTest, ACheckpointFolderThatCannotBeWrittenToIsToldBeforeTheFirstStep) {
  std::ofstream(path("file")) << "x";
  EXPECT_THAT(refusal<Error>(config("run", {"--checkpoint.folder=" + path("file") + "/checkpoint"})),
              AllOf(HasSubstr(path("file")), HasSubstr("Not a directory")));
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

// name -> events, of one rank's trace file.
std::map<std::string, std::vector<nlohmann::json>> trace_of(const std::string& file) {
  std::map<std::string, std::vector<nlohmann::json>> events;
  const auto trace = nlohmann::json::parse(std::ifstream(file));
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") events[event["name"]].push_back(event);
  }
  return events;
}

TEST_F(TrainerTest, WritesTracesOfTheStepsThatProfilingNames) {
  const std::vector<std::string> profiling = {"--profiling.enable_profiling", "--profiling.profile_freq=6"};
  std::vector<std::string> flags = profiling;
  flags.insert(flags.end(), {"--training.local_batch_size=2", "--checkpoint.interval=6"});
  const Weights traced = train(config("run", flags), 2);
  EXPECT_EQ(traced, train(config("untraced", {"--training.local_batch_size=2"}), 2));
  EXPECT_FALSE(std::filesystem::exists(path("untraced/profile_traces")));
  for (const int rank : {0, 1}) {
    const std::string name = "/rank" + std::to_string(rank) + "_trace.json";
    EXPECT_TRUE(std::filesystem::exists(path("run/profile_traces/iteration_6") + name));
    auto events = trace_of(path("run/profile_traces/iteration_12") + name);
    for (const char* once : {"step 12", "gradient clipping", "optimizer", "validation", "checkpoint save", "bucket 0",
                             "wait for gradients"}) {
      EXPECT_EQ(events[once].size(), 1U) << once;
    }
    for (const char* per_part : {"data loading", "forward", "backward"}) EXPECT_EQ(events[per_part].size(), 2U);
    EXPECT_EQ(events["step 11"].size(), 0U);
    const auto begin = [](const nlohmann::json& event) { return event["ts"].get<double>(); };
    const auto end = [&](const nlohmann::json& event) { return begin(event) + event["dur"].get<double>(); };
    const auto& bucket = events["bucket 0"][0];
    EXPECT_NE(bucket["tid"], events["backward"][1]["tid"]);
    EXPECT_EQ(bucket["pid"], rank);
    EXPECT_THAT(bucket["args"]["call"].get<std::string>(), HasSubstr("avg"));
    EXPECT_EQ(bucket["args"]["state"], "finished");
    EXPECT_GT(begin(bucket), begin(events["backward"][1]) - 10);  // the recorder's clock counts microseconds
    EXPECT_LT(end(bucket), end(events["backward"][1]) + 10);
    for (const auto& [what, spans] : events) {
      if (what != "forward" && what != "validation" && what != "optimizer") continue;
      for (const auto& span : spans) EXPECT_LE(end(span), end(events["step 12"][0]) + 1e-3);
    }
  }
}

TEST_F(TrainerTest, ATraceThatIsCutShortIsWrittenAllTheSame) {
  const std::vector<std::string> profiling = {"--profiling.enable_profiling", "--profiling.profile_freq=4",
                                              "--profiling.profiler_active=3"};
  // Stopped after the first of three traced steps.
  train(config("stopped", profiling), 2,
        [asked = std::make_shared<std::atomic<int>>(0)](int) { return asked->fetch_add(1) / 2 >= 1; });
  EXPECT_EQ(result_.step, 2);
  EXPECT_EQ(trace_of(path("stopped/profile_traces/iteration_2/rank1_trace.json")).count("step 2"), 1U);
  // An error in a traced step.
  std::vector<std::string> diverging = profiling;
  diverging.insert(diverging.end(), {"--optimizer.lr=1e30", "--training.max_norm=0", "--lr_scheduler.warmup_steps=0",
                                     "--optimizer.name=SGD", "--profiling.profiler_active=4"});
  EXPECT_THAT(refusal<Error>(config("failed", diverging)), HasSubstr("learning rate"));
  int unfinished = 0;
  for (const auto& folder : std::filesystem::directory_iterator(path("failed/profile_traces"))) {
    for (const auto& [name, events] : trace_of((folder.path() / "rank0_trace.json").string())) {
      unfinished += name.ends_with(", not finished") ? 1 : 0;
    }
  }
  EXPECT_EQ(unfinished, 1);
  // A folder that cannot be made costs the trace, not the run.
  std::ofstream(path("taken")) << "";
  std::vector<std::string> nowhere = profiling;
  nowhere.push_back("--profiling.save_traces_folder=" + path("taken"));
  train(config("run", nowhere), 1);
  EXPECT_EQ(result_.step, 12);
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

TEST(ModelConfig, EveryNumberCanBeChangedAndIsPrinted) {
  const TrainConfig given = parse_config(
      "[model]\nflavor = \"debug\"\ndim = 96\nn_layers = 3\nn_heads = 6\nn_kv_heads = 3\nffn_hidden = 100\n"
      "vocab_size = 600\nrope_theta = 500\nnorm_eps = 0.01\ntie_embeddings = true\n[training]\nseq_len = 40\n",
      "test", {});
  EXPECT_EQ(model_config(given), (models::LlamaConfig{.dim = 96,
                                                      .n_layers = 3,
                                                      .n_heads = 6,
                                                      .n_kv_heads = 3,
                                                      .ffn_hidden = 100,
                                                      .vocab_size = 600,
                                                      .max_seq_len = 40,
                                                      .rope_theta = 500,
                                                      .norm_eps = 0.01,
                                                      .tie_embeddings = true}));
  const TrainConfig whole = with_model_numbers(parse_config("[model]\nflavor = \"llama3_1b\"\n", "test", {}));
  const auto flavor = models::llama_flavor("llama3_1b");
  EXPECT_EQ(whole.model.n_heads, flavor.n_heads);
  EXPECT_EQ(whole.model.n_kv_heads, flavor.n_kv_heads);
  EXPECT_EQ(whole.model.ffn_hidden, flavor.ffn_hidden);
  EXPECT_EQ(whole.model.rope_theta, flavor.rope_theta);
  EXPECT_EQ(whole.model.norm_eps, flavor.norm_eps);
  EXPECT_EQ(*whole.model.tie_embeddings, true);
}

TEST(AutocastGuardTest, ProductsAreInBfloat16WhileItLives) {
  const at::Tensor x = at::randn({2, 3}), weight = at::randn({4, 3});
  {
    const AutocastGuard guard(at::kCPU, true);
    EXPECT_EQ(at::linear(x, weight).scalar_type(), at::kBFloat16);
  }
  EXPECT_EQ(at::linear(x, weight).scalar_type(), at::kFloat);
  const AutocastGuard off(at::kCPU, false);
  EXPECT_EQ(at::linear(x, weight).scalar_type(), at::kFloat);
}

TEST(StopSignalTest, HearsBothSignalsOnceAndGivesThemBack) {
  const auto handler_of = [](int number) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    return action.sa_handler;
  };
  const auto on_int = handler_of(SIGINT), on_term = handler_of(SIGTERM);
  for (const int number : {SIGINT, SIGTERM}) {
    const StopSignal stop;
    EXPECT_FALSE(stop.requested());
    std::raise(number);
    EXPECT_TRUE(stop.requested());
    EXPECT_EQ(stop.signal_number(), number);
    std::raise(number);  // the terminal's and the launcher's come together: still one wish
    EXPECT_TRUE(stop.requested());
  }
  EXPECT_EQ(handler_of(SIGINT), on_int);
  EXPECT_EQ(handler_of(SIGTERM), on_term);
}

/// The scalars under a tag, in their order: in an event the tag is followed by field 2, a little-endian float.
std::vector<float> board_values(const std::filesystem::path& folder, const std::string& tag) {
  std::vector<float> values;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ostringstream text;
    text << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    const std::string contents = text.str(), wanted = static_cast<char>(tag.size()) + tag + '\x15';
    for (auto at = contents.find(wanted); at != std::string::npos; at = contents.find(wanted, at + 1)) {
      float value = 0;
      std::memcpy(&value, contents.data() + at + wanted.size(), sizeof value);
      values.push_back(value);
    }
  }
  return values;
}

TEST(RunFilesTest, TensorBoardHasTorchtitansTags) {
  const TempDirectory folder;
  {
    RunFiles files(folder.path().string(), {.tensorboard_folder = "tb"});
    StepMetrics metrics{.step = 1, .loss = 4, .max_loss = 5, .grad_norm = 0.5, .lr = 0.25, .seconds = 8};
    metrics.data_seconds = 2;
    metrics.tps = 100;
    metrics.tflops = 3;
    metrics.mfu_percent = 40;
    metrics.memory_gib = {1.5, 7};
    files.write_step(metrics, /*to_tensorboard=*/true);
    metrics.loss = 3;
    files.write_step(metrics, /*to_tensorboard=*/false);
    files.write_validation({.step = 1, .loss = 6});
  }
  const auto tb = folder.path() / "tb";
  const std::map<std::string, float> expected = {{"loss_metrics/global_avg_loss", 4},
                                                 {"loss_metrics/global_max_loss", 5},
                                                 {"grad_norm", 0.5},
                                                 {"lr", 0.25},
                                                 {"throughput(tps)", 100},
                                                 {"tflops", 3},
                                                 {"mfu(%)", 40},
                                                 {"time_metrics/end_to_end(s)", 8},
                                                 {"time_metrics/data_loading(s)", 2},
                                                 {"time_metrics/data_loading(%)", 25},
                                                 {"memory/max_reserved(GiB)", 1.5},
                                                 {"validation_metrics/global_avg_loss", 6}};
  for (const auto& [tag, value] : expected) EXPECT_THAT(board_values(tb, tag), ::testing::ElementsAre(value)) << tag;
}

TEST(ModelConfig, TheConfigurationKnowsEveryFlavor) {
  for (const Key& key : known_keys()) {
    if (key.section != "model" || key.name != "flavor") continue;
    EXPECT_EQ(std::vector<std::string>(key.choices.begin(), key.choices.end()), models::llama_flavor_names());
  }
}

}  // namespace
}  // namespace phalanx::train
