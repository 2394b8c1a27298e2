#include "phalanx/config/layout_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/config/training_shape.h"

namespace phalanx::config {
namespace {

using nlohmann::json;

BenchLayout predicted_layout(NamedLayout layout, const plan::Devices& devices) {
  const RunPlan plan = plan_run(layout.config, layout.ranks);
  BenchLayout bench{.layout = std::move(layout), .predicted = {}, .available = devices.smallest()};
  plan::TrainingShape shape = training_shape(bench.layout.config, plan);
  shape.on_device = shape.over_nccl = !devices.is_host;
  shape.shares_memory = devices.is_host;
  bench.predicted = plan::predict_memory(shape);
  return bench;
}

std::vector<std::string> names_in(const std::string& list) {
  std::string words = list;
  std::ranges::replace(words, ';', ' ');
  std::istringstream text(words);
  std::vector<std::string> names;
  for (std::string name; text >> name;) names.push_back(name);
  return names;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double sum_of(const json& list) {
  double sum = 0;
  for (const json& number : list) sum += number.get<double>();
  return sum;
}

}  // namespace

std::vector<BenchLayout> layouts_to_bench(const TrainConfig& config, std::int64_t ranks, const std::string& list,
                                          const plan::Devices& devices) {
  std::vector<BenchLayout> layouts;
  if (list == "auto") {
    for (NamedLayout& layout : all_layouts(config, ranks)) {
      // Only in the run's own precision and without recomputation, because the layouts are compared.
      const bool is_variant = recompute_every(layout.config) != 0 ||
                              layout.config.training.mixed_precision_param != config.training.mixed_precision_param;
      if (layout.ranks == ranks && !is_variant) layouts.push_back(predicted_layout(std::move(layout), devices));
    }
    return layouts;
  }
  for (const std::string& name : names_in(list)) {
    NamedLayout layout = with_layout(config, name, ranks);
    if (layout.ranks != ranks) {
      throw ConfigError(fmt::format("layout '{}' takes {} rank{}, but the others are measured on {}: expected as many",
                                    name, layout.ranks, layout.ranks == 1 ? "" : "s", ranks));
    }
    layouts.push_back(predicted_layout(std::move(layout), devices));
  }
  if (layouts.empty()) throw ConfigError("--layouts names none: expected auto, or such as \"dp_replicate=2 tp=2\"");
  return layouts;
}

ScalingBaseline scaling_baseline(const TrainConfig& config, std::int64_t ranks, const plan::Devices& devices) {
  NamedLayout whole = with_layout(config, "", ranks);
  ScalingBaseline base{.strong_scaling = predicted_layout(whole, devices), .weak_scaling = {}};
  base.strong_scaling.layout.name = "one rank, the same step";
  const std::int64_t step = whole.config.training.global_batch_size;
  if (step % ranks == 0) {
    whole.config.training.global_batch_size = step / ranks;
    whole = with_layout(whole.config, "", 1);
    base.weak_scaling = predicted_layout(whole, devices);
    base.weak_scaling->layout.name = "one rank, its share";
  }
  return base;
}

TrainConfig bench_config(TrainConfig config, const std::string& folder, const BenchSteps& steps) {
  config.job.dump_folder = folder;
  config.training.steps = steps.warm_up + steps.steps;
  config.lr_scheduler.warmup_steps = std::min(config.lr_scheduler.warmup_steps, config.training.steps);
  config.checkpoint = {.enable = false};
  config.metrics = {.enable_tensorboard = false, .enable_report = false};
  config.profiling = {};
  config.validation = {};
  return config;
}

BenchMetrics read_bench_run(const std::string& folder, const BenchSteps& steps) {
  const std::filesystem::path run = folder;
  std::vector<double> seconds;
  double tokens = 0, exposed = 0, waited = 0, communicated = 0;
  std::istringstream lines(read_file(run / "metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const json step = json::parse(line);
    if (step["step"].get<std::int64_t>() <= steps.warm_up) continue;
    seconds.push_back(step["seconds"].get<double>());
    tokens = step["tokens"].get<double>();
    if (!step.contains("exposed_percent")) continue;  // one rank
    exposed += step["exposed_percent"].get<double>();
    waited += sum_of(step["exposed_seconds"]);
    communicated += sum_of(step["comm_seconds"]);
  }
  if (static_cast<std::int64_t>(seconds.size()) < steps.steps) {
    throw DataError(fmt::format("the run in '{}' was stopped after {} of {} steps", folder,
                                static_cast<std::int64_t>(seconds.size()) + steps.warm_up,
                                steps.steps + steps.warm_up));
  }
  BenchMetrics metrics{.step_seconds = median(seconds)};
  metrics.tokens_per_second = tokens / metrics.step_seconds;
  metrics.exposed_percent = exposed / static_cast<double>(seconds.size());
  metrics.exposed_of_communication = communicated > 0 ? 100 * waited / communicated : 0;
  const json memory = json::parse(read_file(run / "run.json"))["memory"];
  for (const json& rank : memory["measured"]) {
    metrics.counted = std::max(metrics.counted, rank["total"].get<std::int64_t>());
    metrics.proportional = std::max(metrics.proportional, rank["pss"].get<std::int64_t>());
  }
  metrics.predicted = memory["predicted"]["total"].get<std::int64_t>();
  return metrics;
}

BenchMetrics median_run(std::vector<BenchMetrics> runs) {
  std::ranges::sort(runs, {}, &BenchMetrics::step_seconds);
  return runs.at(runs.size() / 2);
}

double scaling(const BenchMetrics& metrics, std::int64_t ranks, const BenchMetrics& one_rank) {
  return metrics.tokens_per_second / (static_cast<double>(ranks) * one_rank.tokens_per_second);
}

}  // namespace phalanx::config
