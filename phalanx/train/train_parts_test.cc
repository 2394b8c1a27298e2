// The trainer's smaller parts.
#include <gtest/gtest.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/config/model_config.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/train/metrics_logger.h"
#include "phalanx/train/stop_signal.h"

namespace phalanx::train {
namespace {

TEST(ModelConfig, ExplicitKeysChangeTheFlavor) {
  const config::TrainConfig config =
      config::with_model_numbers(config::parse_config("[model]\nflavor = \"5M\"\nn_layers = 7\n", "test", {}));
  EXPECT_EQ(config.model.dim, 256);
  EXPECT_EQ(config.model.n_layers, 7);
  EXPECT_EQ(config.model.vocab_size, 4096);
}

TEST(ModelConfig, EveryNumberCanBeChangedAndIsPrinted) {
  const config::TrainConfig given = config::parse_config(
      "[model]\nflavor = \"debug\"\ndim = 96\nn_layers = 3\nn_heads = 6\nn_kv_heads = 3\nffn_hidden = 100\n"
      "vocab_size = 600\nrope_theta = 500\nnorm_eps = 0.01\ntie_embeddings = true\n[training]\nseq_len = 40\n",
      "test", {});
  EXPECT_EQ(config::model_config(given), (models::LlamaConfig{.dim = 96,
                                                              .n_layers = 3,
                                                              .n_heads = 6,
                                                              .n_kv_heads = 3,
                                                              .ffn_hidden = 100,
                                                              .vocab_size = 600,
                                                              .max_seq_len = 40,
                                                              .rope_theta = 500,
                                                              .norm_eps = 0.01,
                                                              .tie_embeddings = true}));
  const config::TrainConfig whole =
      config::with_model_numbers(config::parse_config("[model]\nflavor = \"llama3_1b\"\n", "test", {}));
  const auto flavor = models::llama_flavor("llama3_1b");
  EXPECT_EQ(whole.model.n_heads, flavor.n_heads);
  EXPECT_EQ(whole.model.n_kv_heads, flavor.n_kv_heads);
  EXPECT_EQ(whole.model.ffn_hidden, flavor.ffn_hidden);
  EXPECT_EQ(whole.model.rope_theta, flavor.rope_theta);
  EXPECT_EQ(whole.model.norm_eps, flavor.norm_eps);
  EXPECT_EQ(*whole.model.tie_embeddings, true);
}

decltype(SIG_DFL) handler_of(int number) {
  struct sigaction action {};
  sigaction(number, nullptr, &action);
  return action.sa_handler;
}

TEST(StopSignalTest, HearsEachSignalOnceAndGivesThemBack) {
  const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU};
  std::vector<decltype(SIG_DFL)> before;
  for (const int number : numbers) before.push_back(handler_of(number));
  for (const int number : numbers) {
    const StopSignal stop;
    EXPECT_FALSE(stop.requested());
    std::raise(number);
    EXPECT_TRUE(stop.requested());
    EXPECT_EQ(stop.signal_number(), number);
    std::raise(number);  // the terminal's and the launcher's signal come together: still one request
    EXPECT_TRUE(stop.requested());
  }
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(handler_of(numbers[i]), before[i]);
}

// The children of these tests leave by _exit(): a forked process has the main thread alone, and libtorch's destructors
// wait for others that earlier tests have started, such as the profiler's.
TEST(StopSignalTest, OnlyASecondWishOfTheUsersEndsTheProcess) {
  const auto raise_all = [](std::vector<int> numbers) {
    const StopSignal stop({.debounce = std::chrono::milliseconds(0)});
    for (const int number : numbers) std::raise(number);
    ::_exit(stop.signal_number());
  };
  EXPECT_EXIT(raise_all({SIGINT, SIGTERM}), ::testing::KilledBySignal(SIGTERM), "");
  EXPECT_EXIT(raise_all({SIGHUP, SIGINT, SIGINT}), ::testing::KilledBySignal(SIGINT), "");
  EXPECT_EXIT(raise_all({SIGHUP, SIGHUP, SIGTERM, SIGHUP}), ::testing::ExitedWithCode(SIGHUP), "");
  EXPECT_EXIT(raise_all({SIGTERM, SIGHUP}), ::testing::ExitedWithCode(SIGTERM), "");
  EXPECT_EXIT(raise_all({SIGUSR1, SIGXCPU, SIGXCPU}), ::testing::ExitedWithCode(SIGUSR1), "");
  EXPECT_EXIT(raise_all({SIGUSR1, SIGTERM}), ::testing::KilledBySignal(SIGTERM), "");
}

TEST(StopSignalTest, OutsideOfTheStepsTheFirstEndsTheProcessAndOneThatIsHeededMayComeTwice) {
  const auto raise_one = [](int number, bool in_steps, bool after) {
    const StopSignal stop({.debounce = std::chrono::hours(1), .in_steps = in_steps});
    if (after) std::raise(number);
    stop.set_in_steps(false);
    std::raise(number);
    ::_exit(stop.signal_number());
  };
  for (const int number : default_stop_signals()) {
    EXPECT_EXIT(raise_one(number, false, false), ::testing::KilledBySignal(number), "");
    EXPECT_EXIT(raise_one(number, true, false), ::testing::KilledBySignal(number), "");
    EXPECT_EXIT(raise_one(number, true, true), ::testing::ExitedWithCode(number), "");
  }
}

TEST(StopSignalTest, AProcessThatASignalEndsSaysSoWhereItIsAskedTo) {
  const auto raise_all = [](bool in_steps, int times) {
    const StopSignal stop({.debounce = std::chrono::milliseconds(0),
                           .in_steps = in_steps,
                           .exit_message = "the test: ended by a signal "});
    for (int i = 0; i < times; ++i) std::raise(SIGTERM);
    ::_exit(0);
  };
  EXPECT_EXIT(
      raise_all(false, 1), ::testing::KilledBySignal(SIGTERM),
      "^the test: ended by a signal before the first step or after the last save, so nothing was to be saved\n$");
  EXPECT_EXIT(raise_all(true, 2), ::testing::KilledBySignal(SIGTERM),
              "^the test: ended by a signal for the second time, so the steps since the last checkpoint are lost\n$");
  EXPECT_EXIT(raise_all(true, 1), ::testing::ExitedWithCode(0), "^$");
}

TEST(StopSignalTest, WhatIsNotListedIsLeftAlone) {
  const auto before = handler_of(SIGUSR2);
  const StopSignal stop({.signals = {SIGUSR1}});
  EXPECT_EQ(handler_of(SIGUSR2), before);
  std::raise(SIGUSR1);
  EXPECT_EQ(stop.signal_number(), SIGUSR1);
}

TEST(StopSignalTest, AnIgnoredHangUpStaysIgnored) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  {
    const StopSignal stop;
    std::raise(SIGHUP);
    EXPECT_FALSE(stop.requested());
  }
  EXPECT_EQ(handler_of(SIGHUP), SIG_IGN);
  std::signal(SIGHUP, before);
}

/// The scalars under a tag, in their order: in an event the tag is followed by field 2, a little-endian float.
std::vector<float> board_values(const std::filesystem::path& folder, const std::string& tag) {
  std::vector<float> values;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string contents = read_file(entry.path()), wanted = static_cast<char>(tag.size()) + tag + '\x15';
    for (auto at = contents.find(wanted); at != std::string::npos; at = contents.find(wanted, at + 1)) {
      float value = 0;
      std::memcpy(&value, contents.data() + at + wanted.size(), sizeof value);
      values.push_back(value);
    }
  }
  return values;
}

std::string text_of_run_files(const std::filesystem::path& folder) {
  std::string text;
  for (const char* name : {"run.json", "metrics.jsonl"}) {
    if (std::filesystem::exists(folder / name)) text += read_file(folder / name);
  }
  return text;
}

TEST(MetricsLoggerTest, NoCurveIsOfTwoRuns) {
  const TempDirectory folder;
  const auto begin = [&](const std::string& id, std::optional<std::int64_t> resumed_step, std::int64_t step) {
    MetricsLogger files(folder.path().string(), {.id = id, .resumed_step = resumed_step});
    files.describe({{"of", id}});
    files.write_step({.step = step, .loss = static_cast<double>(step), .memory_gib = {0}}, /*to_tensorboard=*/false);
    return files.notes();
  };
  EXPECT_THAT(begin("a", std::nullopt, 1), IsEmpty());
  EXPECT_THAT(begin("a", 1, 2), IsEmpty());
  EXPECT_THAT(begin("", 2, 3), IsEmpty()) << "an older checkpoint does not say whose it is";
  EXPECT_THAT(begin("b", std::nullopt, 1), ElementsAre(HasSubstr("kept in " + (folder.path() / "earlier-1").string())));
  EXPECT_THAT(text_of_run_files(folder.path() / "earlier-1"), AllOf(HasSubstr("\"a\""), HasSubstr("\"step\":3")));
  // The first run resumes from its step 2: what the second run left is none of its steps.
  EXPECT_THAT(begin("a", 2, 4), ElementsAre(HasSubstr("kept in " + (folder.path() / "earlier-2").string()),
                                            HasSubstr("back from " + (folder.path() / "earlier-1").string())));
  EXPECT_THAT(text_of_run_files(folder.path() / "earlier-2"), AllOf(HasSubstr("\"b\""), HasSubstr("\"step\":1")));
  EXPECT_THAT(text_of_run_files(folder.path()), AllOf(HasSubstr("\"step\":2"), HasSubstr("\"step\":4"),
                                                      Not(HasSubstr("\"step\":3")), Not(HasSubstr("\"b\""))));
  // The same command, begun again before its first checkpoint.
  EXPECT_THAT(begin("a", std::nullopt, 1), IsEmpty());
  EXPECT_THAT(text_of_run_files(folder.path()), AllOf(HasSubstr("\"step\":1"), Not(HasSubstr("\"step\":4"))));
}

// The same run, but another branch of it: after a step was moved back, or if two folders share checkpoints.
TEST(MetricsLoggerTest, NoCurveIsOfTwoBranches) {
  const TempDirectory folder;
  const auto kept = folder.path() / "checkpoint" / "abandoned-1";
  std::filesystem::create_directories(kept);
  const auto begin = [&](std::optional<std::int64_t> step, std::optional<double> loss, std::vector<double> losses) {
    MetricsLogger files(folder.path().string(), {.id = "a",
                                                 .resumed_step = step,
                                                 .resumed_loss = loss,
                                                 .checkpoint_folder = (folder.path() / "checkpoint").string()});
    files.describe({{"of", "a"}});
    std::int64_t next = step.value_or(0);
    for (const double one : losses) files.write_step({.step = ++next, .loss = one, .memory_gib = {0}}, false);
    return files.notes();
  };
  EXPECT_THAT(begin(std::nullopt, std::nullopt, {3.5, 3.25, 3.125}), IsEmpty());
  EXPECT_THAT(begin(2, 3.25, {3.0625, 3.03125}), IsEmpty());
  EXPECT_THAT(begin(3, 3.0625, {}), IsEmpty());
  EXPECT_THAT(begin(3, std::nullopt, {}), IsEmpty()) << "an older checkpoint does not say its loss";
  // Another loss of that step, and a step that the curve does not reach.
  const auto first = folder.path() / "earlier-1", second = folder.path() / "earlier-2";
  EXPECT_THAT(begin(3, 3.125, {3.1}), ElementsAre(AllOf(HasSubstr("does not lead to step 3 with a loss of 3.125"),
                                                        HasSubstr("kept in " + first.string()))));
  EXPECT_THAT(text_of_run_files(first), AllOf(HasSubstr("3.0625"), Not(HasSubstr("\"of\"")))) << "the run stays";
  EXPECT_THAT(text_of_run_files(folder.path()), AllOf(HasSubstr("3.1"), HasSubstr("\"of\""), Not(HasSubstr("3.0625"))));
  std::filesystem::copy(first / "metrics.jsonl", kept / "metrics.jsonl");
  EXPECT_THAT(begin(7, 2.5, {}), ElementsAre(HasSubstr("does not lead to step 7")));
  // A curve that leads there is taken up again.
  std::filesystem::remove_all(first);
  begin(std::nullopt, std::nullopt, {9.0});
  EXPECT_THAT(begin(3, 3.0625, {3.0}),
              ElementsAre(HasSubstr("kept in "), HasSubstr("goes on from that in " + kept.string())));
  EXPECT_THAT(text_of_run_files(folder.path()),
              AllOf(HasSubstr("3.5"), HasSubstr("3.0625"), HasSubstr("\"step\":4,\"loss\":3.0"),
                    Not(HasSubstr("\"loss\":9.0"))));
  EXPECT_TRUE(std::filesystem::exists(kept / "metrics.jsonl"));
}

TEST(MetricsLoggerTest, TensorBoardHasTorchtitansTags) {
  const TempDirectory folder;
  {
    MetricsLogger files(folder.path().string(), {.tensorboard_folder = "tb"});
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
  for (const auto& [tag, value] : expected) EXPECT_THAT(board_values(tb, tag), ElementsAre(value)) << tag;
}

// A node that crashed left it empty, or a user has changed it.
TEST(MetricsLoggerTest, ADamagedDescriptionOfTheRunIsSetAsideAndSaid) {
  for (const std::string text : {"", "{\"history\": [", "[]", "{\"history\": 3}"}) {
    const TempDirectory folder;
    const auto path = folder.path() / "run.json";
    std::ofstream(path) << text;
    ::testing::internal::CaptureStderr();
    {
      MetricsLogger files(folder.path().string(), {.resumed_step = 4});
      files.add_to("history", 7);
    }
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                HasSubstr(path.string() + " is damaged (expected a JSON object with the list \"history\")"));
    EXPECT_EQ(nlohmann::json::parse(read_file(path)).dump(), "{\"history\":[7]}");
    EXPECT_EQ(read_file(path.string() + ".damaged"), text);
  }
}

TEST(ModelConfig, TheConfigurationKnowsEveryFamilyAndFlavor) {
  std::vector<std::string> families, flavors = models::all_flavor_names();
  for (const auto family : models::all_families()) families.emplace_back(models::family_name(family));
  flavors.emplace_back(config::kFlavorOfDirectory);
  for (const config::Key& key : config::known_keys()) {
    if (key.section != "model" || (key.name != "flavor" && key.name != "name")) continue;
    EXPECT_EQ(std::vector<std::string>(key.choices.begin(), key.choices.end()),
              key.name == "name" ? families : flavors);
  }
}

TEST(ModelConfig, AFamilyIsChosenByName) {
  const auto model_of = [](const std::string& keys) {
    return config::model_config(config::parse_config("[model]\n" + keys, "test", {}));
  };
  EXPECT_EQ(model_of("name = \"gemma3\"\nflavor = \"debug\"\nn_layers = 13\n").full_layers,
            (std::vector<std::int64_t>{5, 11}));
  EXPECT_EQ(model_of("name = \"qwen3\"\nflavor = \"0.6B\"\n").parameter_count(), 596'049'920);
  EXPECT_THAT(error_text<ConfigError>([&] { model_of("flavor = \"olmo2_1b\"\n"); }),
              HasSubstr("the flavor 'olmo2_1b' is of the model olmo2, not of llama"));
  EXPECT_THAT(error_text<ConfigError>([&] { model_of("name = \"qwen3\"\nflavor = \"50M\"\n"); }),
              HasSubstr("the flavor '50M' is of the model llama, not of qwen3"));
}

}  // namespace
}  // namespace phalanx::train
