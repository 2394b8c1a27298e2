#include "phalanx/train/trainer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <atomic>
#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/process_stats.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/model_config.h"
#include "phalanx/optim/lr_schedule.h"
#include "phalanx/train/device_info.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

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
  // The effective configuration in run.json can be read back.
  EXPECT_EQ(config::parse_config(run["config"].get<std::string>(), "run.json", {}).model.dim, 64);
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

// Each key of the optimizer and the data must have an effect: another value gives other weights.
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
                           "--optimizer.no_decay=*norm*", "--training.no-shuffle", "--model.rope_theta=100"}) {
    EXPECT_NE(weights({flag}), adamw) << flag;
  }
  for (const char* flag : {"--optimizer.momentum=0.5", "--optimizer.weight_decay=0.9", "--optimizer.lr=1e-2",
                           "--optimizer.no_decay=*norm*"}) {
    EXPECT_NE(weights({sgd, flag}), plain) << flag;
  }
  EXPECT_EQ(weights({"--optimizer.no_decay=*"}), weights({"--optimizer.weight_decay=0"}));
  const std::string groups = "--optimizer.groups=";
  EXPECT_EQ(weights({groups + R"([{params = ["*"], weight_decay = 0.9}])"}), weights({"--optimizer.weight_decay=0.9"}));
  EXPECT_EQ(weights({groups + R"([{params = ["*norm*"], weight_decay = 0}])"}),
            weights({"--optimizer.no_decay=*norm*"}));
  for (const auto& name : {std::vector<std::string>{}, {sgd}}) {
    auto by_group = name, by_rate = name;
    by_group.push_back(groups + R"([{params = ["*"], lr_factor = 0.5}])");
    by_group.emplace_back("--optimizer.lr=0.25");
    by_rate.emplace_back("--optimizer.lr=0.125");
    EXPECT_EQ(weights(by_group), weights(by_rate));  // at every step of the schedule
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
  // The first step of a warm-up over four is like one step at a quarter of the rate.
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
    const auto model = config::model_config(config(run));
    const auto steps = lines_with(run, "loss");
    ASSERT_EQ(steps.size(), 12U);
    double cpu_of_rank_0 = 0;
    bool losses_differ = false;
    int steps_of_data_only = 0;
    for (const auto& line : steps) {
      EXPECT_EQ(line["tokens"], 8 * 32);
      const double tps = line["tps"], tflops = line["tflops"], seconds = line["seconds"];
      EXPECT_NEAR(tps, 8.0 * 32 / ranks / seconds, 1e-6 * tps);
      EXPECT_NEAR(tflops, tps * model.flops_per_token(32) / 1e12, 1e-6 * tflops);
      EXPECT_GT(line["grad_norm"].get<double>(), 0.0);
      EXPECT_NE(line["grad_norm"], line["loss"]);
      // Of the slowest rank, whose step may have begun before that of rank 0: a node that stalls just then is visible
      // in one step.
      steps_of_data_only += line["data_seconds"].get<double>() >= seconds ? 1 : 0;
      ASSERT_EQ(line["memory_gib"].size(), static_cast<std::size_t>(ranks));
      EXPECT_LE(line["memory_gib"][0].get<double>(), static_cast<double>(peak_resident_bytes()) / (1 << 30));
      EXPECT_GT(line["memory_gib"][0].get<double>(), 0.25 * static_cast<double>(peak_resident_bytes()) / (1 << 30));
      cpu_of_rank_0 += line["cpu_seconds"][0].get<double>();
      EXPECT_GE(line["max_loss"].get<double>(), line["loss"].get<double>() - 1e-12);
      losses_differ = losses_differ || line["max_loss"] != line["loss"];
    }
    EXPECT_EQ(losses_differ, ranks > 1);
    EXPECT_LE(steps_of_data_only, ranks - 1);
    EXPECT_LE(cpu_of_rank_0, cpu_spent + 0.05);
    const double peak = 100.0 * steps[5]["tflops"].get<double>() / steps[5]["mfu_percent"].get<double>();
    const double measured = *device_peak_tflops(at::kCPU, "");
    EXPECT_GT(peak, 0.1 * measured);
    EXPECT_LT(peak, 10.0 * measured);
    const auto description = nlohmann::json::parse(std::ifstream(path(run) + "/run.json"));
    EXPECT_THAT(description["environment"]["memory"].get<std::string>(),
                StartsWith(human_bytes(static_cast<std::uint64_t>(model.parameter_count()) * 4 * 4)));
  }
  EXPECT_GT(host_memory_bytes(), std::uint64_t{256} << 20);
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

TEST_F(TrainerTest, AGradientThatIsNotFiniteEndsTheRunBeforeItIsUsed) {
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    Trainer trainer(config("run"), {.world = world, .quiet = true});
    trainer.model().output->weight.register_hook([](const at::Tensor& grad) { return grad.mul(NAN); });
    const at::Tensor before = trainer.model().output->weight.detach().clone();
    EXPECT_THAT(error_text([&] { trainer.run(); }),
                AllOf(HasSubstr("step 1: the gradient norm is "), HasSubstr("learning rate")));
    EXPECT_TRUE(trainer.model().output->weight.equal(before));
  });
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
  flags.insert(flags.end(), {"--training.local_batch_size=2", "--checkpoint.interval=6", "--profiling.record_kernels"});
  const Weights traced = train(config("run", flags), 2);
  EXPECT_EQ(traced, train(config("untraced", {"--training.local_batch_size=2"}), 2));
  EXPECT_FALSE(std::filesystem::exists(path("untraced/profile_traces")));
  // Both ranks are threads of this process, which records for one of them.
  int recorded = 0;
  for (const int rank : {0, 1}) {
    const std::string table = path(fmt::format("run/profile_traces/iteration_12/rank{}_kernels.txt", rank));
    if (!std::filesystem::exists(table)) continue;
    ++recorded;
    EXPECT_THAT(read_file(table), HasSubstr(" operators in "));
    EXPECT_THAT(read_file(table), HasSubstr("aten::"));
  }
  EXPECT_EQ(recorded, 1);
  for (const int rank : {0, 1}) {
    const std::string name = "/rank" + std::to_string(rank) + "_trace.json";
    EXPECT_TRUE(std::filesystem::exists(path("run/profile_traces/iteration_6") + name));
    auto events = trace_of(path("run/profile_traces/iteration_12") + name);
    for (const char* once :
         {"step 12", "gradient clipping", "optimizer", "validation", "checkpoint save", "bucket 0"}) {
      EXPECT_EQ(events[once].size(), 1U) << once;
    }
    ASSERT_GE(events["wait for all_gather"].size(), 1U);  // of the step metrics
    EXPECT_EQ(events["wait for all_gather"][0]["tid"], events["optimizer"][0]["tid"]);
    for (const char* per_part : {"data loading", "forward", "backward"}) EXPECT_EQ(events[per_part].size(), 2U);
    EXPECT_EQ(events["step 11"].size(), 0U);
    const auto begin = [](const nlohmann::json& event) { return event["ts"].get<double>(); };
    const auto end = [&](const nlohmann::json& event) { return begin(event) + event["dur"].get<double>(); };
    const auto& bucket = events["bucket 0"][0];
    EXPECT_NE(bucket["tid"], events["backward"][1]["tid"]);
    EXPECT_EQ(bucket["pid"], rank);
    EXPECT_THAT(bucket["args"]["call"].get<std::string>(), HasSubstr("sum"));
    EXPECT_EQ(bucket["args"]["state"], "finished");
    EXPECT_GT(begin(bucket), begin(events["backward"][1]) - 10);  // the recorder's clock has microseconds
    EXPECT_LT(end(bucket), end(events["backward"][1]) + 10);
    for (const auto& [what, spans] : events) {
      if (what != "forward" && what != "validation" && what != "optimizer") continue;
      for (const auto& span : spans) EXPECT_LE(end(span), end(events["step 12"][0]) + 1e-3);
    }
  }
}

TEST_F(TrainerTest, CommunicationThatNothingHidIsTold) {
  train(config("alone"), 1);
  EXPECT_TRUE(lines_with("alone", "exposed_seconds").empty());
  for (const std::string degree : {"1", "-1"}) {
    const std::string name = "two" + degree;
    train(config(name, {"--parallelism.data_parallel_shard_degree=" + degree, "--checkpoint.interval=4"}), 2);
    const auto lines = lines_with(name, "exposed_percent");
    ASSERT_EQ(lines.size(), 12U);
    for (const auto& line : lines) {
      ASSERT_EQ(line["comm_seconds"].size(), 2U);
      for (const std::size_t rank : {0, 1}) EXPECT_GT(line["comm_seconds"][rank].get<double>(), 0);
      // No thread can have waited for longer than its step took.
      EXPECT_GT(line["exposed_percent"].get<double>(), 0);
      EXPECT_LE(line["exposed_percent"].get<double>(), 100.01);
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
  // If the folder cannot be created, the trace is lost, not the run.
  std::ofstream(path("taken")) << "";
  std::vector<std::string> nowhere = profiling;
  nowhere.push_back("--profiling.save_traces_folder=" + path("taken"));
  train(config("run", nowhere), 1);
  EXPECT_EQ(result_.step, 12);
}

// The loss of the previous step is finite, and there is no later step that would show it.
TEST_F(TrainerTest, WeightsThatAreNotFiniteAreNotSaved) {
  int number = 0;
  for (const char* layout : {"", "--parallelism.data_parallel_shard_degree=2", "--parallelism.tensor_parallel_degree=2",
                             "--parallelism.pipeline_parallel_degree=2", "--checkpoint.no-enable"}) {
    const std::string folder = fmt::format("run{}", ++number);
    std::vector<std::string> flags = {"--training.steps=1", "--lr_scheduler.warmup_steps=0", "--optimizer.lr=3e38",
                                      "--optimizer.weight_decay=100", "--checkpoint.last_save_in_hf"};
    if (*layout != '\0') flags.emplace_back(layout);
    const std::string text = refusal<Error>(config(folder, flags), number > 1 ? 2 : 1);
    EXPECT_THAT(text, HasSubstr("step 1, learning rate 3e+38: the weight ")) << layout;
    EXPECT_THAT(text, HasSubstr(" is not finite on rank 0: nothing is saved; try a lower [optimizer] lr")) << layout;
    EXPECT_FALSE(std::filesystem::exists(path(folder + "/checkpoint/step-1"))) << layout;
    EXPECT_FALSE(std::filesystem::exists(path(folder + "/hf"))) << layout;
  }
}

TEST_F(TrainerTest, UserErrorsAreNamed) {
  EXPECT_THAT(refusal<ConfigError>(config("run", {"--training.dataset_path="})), HasSubstr("dataset_path is not set"));
  EXPECT_THAT(refusal<Error>(config("run", {"--training.dataset_path=/nonexistent.bin"})),
              HasSubstr("/nonexistent.bin"));
  EXPECT_THAT(refusal<ConfigError>(config("run", {"--training.global_batch_size=7"})),
              HasSubstr("global_batch_size 7 is not a multiple"));
  EXPECT_THAT(refusal<ConfigError>(config("run", {"--model.n_kv_heads=3"})), HasSubstr("n_kv_heads"));
  EXPECT_THAT(refusal<ConfigError>(config("run", {"--optimizer.no_decay=*.bias"})),
              HasSubstr("no_decay: pattern '*.bias' matches none of the 21 parameters; the nearest is"));
  EXPECT_THAT(
      refusal<ConfigError>(config("run", {R"(--optimizer.groups=[{params = ["*.bias"], lr_factor = 2}])"})),
      HasSubstr("[[optimizer.groups]], group 1: pattern '*.bias' matches none of the 21 parameters; the nearest"));
  EXPECT_THAT(refusal<ConfigError>(config("run", {R"(--optimizer.groups=[{params = ["*norm*"], lr_factor = 2},)"
                                                  R"( {params = ["norm.*"], weight_decay = 0}])"})),
              HasSubstr("parameter 'norm.weight' belongs to group 1 (\"*norm*\") and to group 2 (\"norm.*\"): expected "
                        "one group at most"));
  EXPECT_THAT(refusal<CheckpointError>(config("run", {"--checkpoint.initial_load_path=/nonexistent"})),
              HasSubstr("/nonexistent"));
}

}  // namespace
}  // namespace phalanx::train
