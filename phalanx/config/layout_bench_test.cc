#include "phalanx/config/layout_bench.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/training_shape.h"
#include "phalanx/plan/layout.h"

namespace phalanx::config {
namespace {

TrainConfig bench_run_config() {
  TrainConfig config;
  config.training.local_batch_size = 2;
  config.training.seq_len = 32;
  return config;
}

plan::Devices node_of(std::int64_t ranks, std::int64_t bytes) {
  return {.groups = {{.count = ranks, .name = "", .bytes = bytes}}, .per_node = ranks, .is_host = true};
}

std::string bench_refusal(const std::string& list) {
  return error_text<ConfigError>([&] { layouts_to_bench(bench_run_config(), 2, list, node_of(2, 1 << 30)); });
}

TEST(LayoutBench, AutoIsEveryLayoutOfSoManyRanks) {
  std::vector<std::string> names;
  for (const BenchLayout& layout : layouts_to_bench(bench_run_config(), 2, "auto", node_of(2, 1 << 30))) {
    names.push_back(layout.layout.name);
    EXPECT_EQ(layout.layout.ranks, 2);
    EXPECT_TRUE(layout.fits());
  }
  EXPECT_THAT(names,
              ElementsAre("pp=2", "dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3",
                          "cp=2", "cp=2,exchange=heads", "cp=2,exchange=ring", "cp=2,zero=3", "tp=2"));
}

TEST(LayoutBench, FitsByItsPredictedMemory) {
  for (const auto& [name, ranks] : {std::pair("dp_replicate=2", 2), std::pair("pp=2,dp_shard=2", 4)}) {
    const auto with_memory = [&](std::int64_t bytes) {
      return layouts_to_bench(bench_run_config(), ranks, name, node_of(ranks, bytes))[0];
    };
    const std::int64_t need = with_memory(1 << 30).predicted.total();
    EXPECT_TRUE(with_memory(need).fits()) << name;
    EXPECT_FALSE(with_memory(need - 1).fits()) << name;
  }
}

TEST(LayoutBench, ListsAreNames) {
  EXPECT_EQ(layouts_to_bench(bench_run_config(), 2, "tp=2; pp=2  dp_shard=2", node_of(2, 1 << 30)).size(), 3U);
  EXPECT_THAT(bench_refusal("tp=1"), HasSubstr("takes 1 rank, but the others are measured on 2"));
  EXPECT_THAT(bench_refusal("tp=4"), HasSubstr("takes 4 ranks, but there are 2"));
  EXPECT_THAT(bench_refusal("tq=2"), HasSubstr("did you mean 'tp'?"));
  EXPECT_THAT(bench_refusal(" ; "), HasSubstr("--layouts names none"));
}

TEST(LayoutBench, OneRankHasTheSameStepOrItsShare) {
  const ScalingBaseline base = scaling_baseline(bench_run_config(), 2, node_of(2, 1 << 30));
  EXPECT_EQ(plan_run(base.strong_scaling.layout.config, 1).global_batch_size, 4);
  ASSERT_TRUE(base.weak_scaling);
  EXPECT_EQ(plan_run(base.weak_scaling->layout.config, 1).global_batch_size, 2);
  TrainConfig odd = bench_run_config();
  odd.training.global_batch_size = 9;
  odd.training.local_batch_size = 1;
  EXPECT_FALSE(scaling_baseline(odd, 2, node_of(2, 1 << 30)).weak_scaling);
}

TEST(LayoutBench, RunsLeaveNothingButFigures) {
  TrainConfig config = bench_run_config();
  config.validation.enable = true;
  config.profiling.enable_profiling = true;
  config.metrics.sample_prompt = "once";
  config.checkpoint.initial_load_in_hf = true;
  const TrainConfig bench = bench_config(config, "folder", {.steps = 5, .warm_up = 1});
  EXPECT_EQ(bench.training.steps, 6);
  EXPECT_EQ(bench.lr_scheduler.warmup_steps, 6);
  EXPECT_FALSE(bench.checkpoint.enable || bench.checkpoint.initial_load_in_hf || bench.validation.enable ||
               bench.profiling.enable_profiling || bench.metrics.enable_report);
  EXPECT_EQ(bench.metrics.sample_prompt, "");
  EXPECT_EQ(parse_config(print_config(bench), "bench", {}).training.local_batch_size, 2);
}

TEST(LayoutBench, FiguresComeFromTheRunsFiles) {
  TempDirectory folder;
  std::string lines;
  for (int step = 1; step <= 5; ++step) {
    // The first is slow and does not count; the median of 1, 2, 4 and 3 s is 2.5.
    const double seconds[] = {100, 1, 2, 4, 3};
    lines += fmt::format(
        R"({{"step":{},"seconds":{},"tokens":1000,"exposed_percent":{},"comm_seconds":[1,3],"exposed_seconds":[0.5,0.5]}})"
        "\n",
        step, seconds[step - 1], 10 * step);
  }
  write_file(folder.path() / "metrics.jsonl", lines);
  write_file(
      folder.path() / "run.json",
      R"({"memory": {"measured": [{"total": 10, "pss": 30}, {"total": 20, "pss": 25}], "predicted": {"total": 19}}})");
  const BenchMetrics metrics = read_bench_run(folder.path().string(), {.steps = 4, .warm_up = 1});
  EXPECT_DOUBLE_EQ(metrics.step_seconds, 2.5);
  EXPECT_DOUBLE_EQ(metrics.tokens_per_second, 400);
  EXPECT_DOUBLE_EQ(metrics.exposed_percent, 35);
  EXPECT_DOUBLE_EQ(metrics.exposed_of_communication, 25);
  EXPECT_EQ(metrics.counted, 20);
  EXPECT_EQ(metrics.proportional, 30);
  EXPECT_EQ(metrics.predicted, 19);
  EXPECT_DOUBLE_EQ(scaling(metrics, 2, {.tokens_per_second = 250}), 0.8);
  EXPECT_THROW(read_bench_run(folder.path().string(), {.steps = 5, .warm_up = 1}), DataError);
}

TEST(LayoutBench, OfSeveralRunsTheMiddleOneStands) {
  EXPECT_EQ(median_run({{.step_seconds = 3}, {.step_seconds = 1}, {.step_seconds = 2}}).step_seconds, 2);
}

// The planner's description of a layout is what training makes of the settings that the planner gives.
TEST(LayoutBench, SettingsOfALayoutMakeThatLayout) {
  const std::vector<plan::Layout> layouts = {
      {.parallel = {.dp_replicate = 4}, .batch = 2},
      {.parallel = {.dp_shard = 4, .zero_stage = 1}, .batch = 1, .passes = 2, .recompute_every = 1},
      {.parallel = {.dp_replicate = 2, .dp_shard = 2}, .batch = 2, .recompute_every = 1, .uses_op_sac = true},
      {.parallel = {.dp_shard = 2, .tp = 2, .zero_stage = 2}, .batch = 4},
      {.parallel = {.pp = 2, .dp_replicate = 2}, .batch = 2, .passes = 2},
      {.parallel = {.pp = 2, .dp_shard = 2, .zero_stage = 1}, .batch = 2, .passes = 2},
      {.parallel = {.pp = 2, .dp_shard = 2}, .batch = 2, .passes = 2},  // resharded after every pass
      {.parallel = {.pp = 2, .dp_shard = 2}, .batch = 2, .passes = 2, .reshard_after_forward = false},
      {.parallel = {.dp_shard = 4}, .batch = 2, .reshard_after_forward = false},
  };
  for (const plan::Layout& layout : layouts) {
    std::vector<std::string> words = {"--training.seq_len=32"};
    for (const plan::Setting& setting : plan::settings_of(layout)) {
      std::string value = setting.value;
      std::erase(value, '"');
      words.push_back(fmt::format("--{}.{}={}", setting.section, setting.key, value));
    }
    const TrainConfig config = parse_config("", "settings", words);
    const RunPlan plan = plan_run(config, 4);
    EXPECT_EQ(plan::name_of(layout_of(config, plan)), plan::name_of(layout));
    const auto from_layout = plan::predict_memory(plan::apply_layout(shape_without_layout(config), layout));
    EXPECT_EQ(plan::predict_memory(training_shape(config, plan)).total(), from_layout.total()) << plan::name_of(layout);
    // The same for its name, which verify and bench accept.
    const NamedLayout named = with_layout(config, plan::name_of(layout), 4);
    EXPECT_EQ(plan::predict_memory(training_shape(named.config, plan_run(named.config, 4))).total(),
              from_layout.total())
        << plan::name_of(layout);
  }
}

}  // namespace
}  // namespace phalanx::config
