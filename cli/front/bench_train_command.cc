#include "cli/front/bench_train_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/front/launch_command.h"
#include "cli/front/worker_program.h"
#include "cli/parse_options.h"
#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/human.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/config/layout_bench.h"
#include "phalanx/launch/rendezvous/worker_environment.h"
#include "phalanx/launch/supervisor/supervisor.h"
#include "phalanx/plan/bytes_text.h"

namespace phalanx::cli {

const std::string_view kBenchTrainHelp =
    R"(usage: phalanx bench train CONFIG.toml [--layouts auto|LIST] [-n N] [--steps K] [options]
                           [--section.key value ...]

Trains a few steps of CONFIG.toml under several layouts of N ranks of this node, and on one rank, one after the other;
tells tokens per second, how that scales, memory and exposed communication. Every run is in a folder that is removed.

      --layouts auto|LIST  every layout of N ranks that fits by its predicted memory (default), or names as `phalanx
                           verify --layout` has them: "dp_replicate=2 dp_shard=2,zero=1 tp=2"
  -n, --ranks N            ranks of this node (2)
      --steps K            measured steps of each run (8); --warm-up W before them (2)
      --rounds R           the layouts take turns so often, and the run in the middle stands (1)
      --devices NAME       what a rank is on, for --layouts auto, as `phalanx plan` takes it (this: an equal part of the
                           memory of this node)
      --json FILE          the table in numbers

Strong scaling is tokens per second by N times those of one rank that takes the same step, weak scaling by N times those
of one rank with an N-th of the step. All ranks have as many threads, cores / N, or OMP_NUM_THREADS. Other programs on
the node disturb the times.

  phalanx bench train run.toml -n 2
  phalanx bench train run.toml --layouts "dp_shard=4,zero=1 dp_shard=4,zero=3 pp=2,tp=2" -n 4 --json layouts.json

Ends with status 1 if a layout failed: its row says why.
)";

namespace {

using config::BenchLayout;
using config::BenchMetrics;
using nlohmann::json;

struct BenchTrainArguments {
  config::TrainConfig config;
  int ranks = 2;
  std::int64_t rounds = 1;
  config::BenchSteps steps;
  std::string layouts = "auto", json;
  plan::Devices devices;
};

BenchTrainArguments parse(const Arguments& arguments) {
  BenchTrainArguments parsed;
  std::string ranks, device = "this";
  CLI::App app;
  app.allow_extras();
  add_ranks_option(app, ranks, "-n,--ranks,--nproc-per-node");
  app.add_option("--steps", parsed.steps.steps);
  app.add_option("--warm-up", parsed.steps.warm_up);
  app.add_option("--rounds", parsed.rounds);
  app.add_option("--layouts", parsed.layouts);
  app.add_option("--json", parsed.json);
  app.add_option("--devices", device);
  Arguments overrides = parse_options(app, arguments);
  require_range("--steps", parsed.steps.steps, 1);
  require_range("--warm-up", parsed.steps.warm_up, 0);
  require_range("--rounds", parsed.rounds, 1);
  if (!ranks.empty()) parsed.ranks = parse_rank_count("-n", ranks);
  parsed.devices = plan::parse_devices(fmt::format("{}x{}", parsed.ranks, device), {});
  const std::string path = take_config_path(overrides, "bench train");
  parsed.config = config::read_config(path, overrides);
  return parsed;
}

/// The runs of one layout, or the reason why there are none.
struct Row {
  BenchLayout layout;
  std::vector<BenchMetrics> runs;
  std::string failure;
  bool is_base = false;
};

/// The part of a long error that the user needs.
std::string first_line_of(const std::string& text) {
  const std::string line = text.substr(0, text.find('\n'));
  return line.empty() ? "it was stopped" : line;
}

/// Trains the layout once. Returns true unless the user wants to stop.
bool run_once(Row& row, const BenchTrainArguments& arguments, int threads) {
  const TempDirectory folder("bench-train");
  const std::string config = folder.path() / "run.toml", run = folder.path() / "run";
  write_file(config, config::print_config(config::bench_config(row.layout.layout.config, run, arguments.steps)));
  SupervisorOptions options;
  options.command = {worker_program(), "train", config};
  options.ranks = static_cast<int>(row.layout.layout.ranks);
  options.environment["OMP_NUM_THREADS"] = std::to_string(threads);
  options.logs.directory = folder.path() / "logs";
  options.logs.redirects.all = 3;
  const SupervisorResult result = supervise(options);
  if (result.exit_status != 0) {
    row.failure = first_line_of(result.error);
    return !result.error.empty();
  }
  try {
    row.runs.push_back(config::read_bench_run(run, arguments.steps));
    return true;
  } catch (const DataError& error) {  // Ctrl-C ends training early without an error
    row.failure = "it was stopped";
    return false;
  }
}

json to_json(const Row& row, const BenchMetrics* strong, const BenchMetrics* weak) {
  json object = {{"layout", row.layout.layout.name}, {"ranks", row.layout.layout.ranks}, {"failure", row.failure}};
  if (row.runs.empty()) return object;
  const BenchMetrics metrics = config::median_run(row.runs);
  object.update({{"tokens_per_second", metrics.tokens_per_second},
                 {"step_seconds", metrics.step_seconds},
                 {"exposed_percent_of_step", metrics.exposed_percent},
                 {"exposed_percent_of_communication", metrics.exposed_of_communication},
                 {"counted_bytes", metrics.counted},
                 {"predicted_bytes", metrics.predicted},
                 {"pss_bytes", metrics.proportional}});
  for (const BenchMetrics& run : row.runs) object["runs_step_seconds"].push_back(run.step_seconds);
  if (!row.is_base && strong != nullptr) {
    object["strong_scaling"] = config::scaling(metrics, row.layout.layout.ranks, *strong);
  }
  if (!row.is_base && weak != nullptr) {
    object["weak_scaling"] = config::scaling(metrics, row.layout.layout.ranks, *weak);
  }
  return object;
}

std::string share_text(const json& row, const char* key) {
  return row.contains(key) ? fmt::format("{:.2f}", row[key].get<double>()) : "-";
}

void print_table(const json& rows) {
  std::size_t width = 6;
  for (const json& row : rows) width = std::max(width, row["layout"].get<std::string>().size());
  const auto line = [&](const std::string& name, const auto&... cells) {
    fmt::print("| {:<{}} | {:>8} | {:>6} | {:>5} | {:>9} | {:>18} | {:>15} | {:>12} |\n", name, width, cells...);
  };
  line("layout", "tokens/s", "strong", "weak", "memory", "predicted", "exposed of step", "of messages");
  line(std::string(width, '-'),
       "-------:", "-----:", "----:", "--------:", "-----------------:", "--------------:", "-----------:");
  for (const json& row : rows) {
    const std::string name = row["layout"].get<std::string>();
    if (!row.contains("tokens_per_second")) {
      fmt::print("| {:<{}} | failed: {}\n", name, width, row["failure"].get<std::string>());
      continue;
    }
    const auto counted = row["counted_bytes"].get<std::int64_t>(),
               predicted = row["predicted_bytes"].get<std::int64_t>();
    const bool is_alone = row["ranks"] == 1;
    const auto percent = [&](const char* key) {
      return is_alone ? std::string("-") : fmt::format("{:.1f} %", row[key].get<double>());
    };
    const auto difference = 100.0 * (static_cast<double>(predicted) / static_cast<double>(counted) - 1);
    line(name, with_commas(static_cast<std::int64_t>(row["tokens_per_second"].get<double>())),
         share_text(row, "strong_scaling"), share_text(row, "weak_scaling"), plan::bytes_text(counted),
         fmt::format("{} ({:+.1f} %)", plan::bytes_text(predicted), difference), percent("exposed_percent_of_step"),
         percent("exposed_percent_of_communication"));
  }
}

}  // namespace

int bench_train_command(const Arguments& words) {
  const BenchTrainArguments arguments = parse(words);
  const WorkerEnvironment started_by = read_worker_environment();
  if (started_by.world_size > 1 || std::getenv("RANK") != nullptr) {
    throw UsageError("phalanx bench train starts ranks itself, but this process is itself a rank of a launcher");
  }
  const int threads = threads_from_environment().value_or(std::max(1, usable_cores() / arguments.ranks));
  std::vector<Row> rows;
  std::vector<std::string> left_out;
  const auto add = [&](BenchLayout layout, bool is_base) {
    const bool may_run = layout.fits() || (arguments.layouts != "auto" && !is_base);
    if (may_run) {
      rows.push_back({.layout = std::move(layout), .runs = {}, .failure = "", .is_base = is_base});
      return;
    }
    left_out.push_back(fmt::format("{} needs {} a rank of {}", layout.layout.name,
                                   plan::bytes_text(layout.predicted.total()), plan::bytes_text(layout.available)));
  };
  config::ScalingBaseline base = config::scaling_baseline(arguments.config, arguments.ranks, arguments.devices);
  const std::int64_t step = base.strong_scaling.layout.config.training.global_batch_size;
  add(base.strong_scaling, true);
  if (base.weak_scaling) add(*base.weak_scaling, true);
  for (BenchLayout& layout :
       config::layouts_to_bench(arguments.config, arguments.ranks, arguments.layouts, arguments.devices)) {
    add(std::move(layout), false);
  }
  fmt::print("{} sequences of {} tokens a step, {} measured steps a run, {} ranks of {} thread{}\n", step,
             arguments.config.training.seq_len, arguments.steps.steps, arguments.ranks, threads,
             threads == 1 ? "" : "s");
  for (const std::string& text : left_out) fmt::print("does not fit: {}\n", text);
  std::fflush(stdout);

  bool goes_on = true;
  for (std::int64_t round = 0; goes_on && round < arguments.rounds; ++round) {
    for (std::size_t i = 0; goes_on && i < rows.size(); ++i) {
      Row& row = rows[i];
      if (!row.failure.empty()) continue;
      fmt::print(stderr, "[{}/{}] {}\n", static_cast<std::size_t>(round) * rows.size() + i + 1,
                 static_cast<std::size_t>(arguments.rounds) * rows.size(), row.layout.layout.name);
      goes_on = run_once(row, arguments, threads);
    }
  }

  const auto metrics_of = [&](const std::string& name) -> std::optional<BenchMetrics> {
    const auto row = std::ranges::find_if(
        rows, [&](const Row& one) { return one.is_base && one.layout.layout.name == name && !one.runs.empty(); });
    return row == rows.end() ? std::nullopt : std::optional(config::median_run(row->runs));
  };
  const auto strong = metrics_of(base.strong_scaling.layout.name);
  const auto weak = base.weak_scaling ? metrics_of(base.weak_scaling->layout.name) : std::nullopt;
  json table = json::array();
  bool failed = !goes_on;
  for (const Row& row : rows) {
    if (row.runs.empty() && row.failure.empty()) continue;  // stopped before this layout ran
    table.push_back(to_json(row, strong ? &*strong : nullptr, weak ? &*weak : nullptr));
    failed = failed || !row.failure.empty();
  }
  print_table(table);
  if (!arguments.json.empty()) {
    write_file(arguments.json, json{{"ranks", arguments.ranks},
                                    {"threads", threads},
                                    {"sequences", step},
                                    {"seq_len", arguments.config.training.seq_len},
                                    {"left_out", left_out},
                                    {"layouts", table}}
                                       .dump(2) +
                                   "\n");
  }
  return failed ? 1 : 0;
}

}  // namespace phalanx::cli
