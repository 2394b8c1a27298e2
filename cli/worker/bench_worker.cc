#include "cli/worker/bench_worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "cli/bench_arguments.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/measure/collectives/comm_bench.h"
#include "phalanx/measure/comm_bench_plot.h"
#include "phalanx/train/stop_signal.h"

namespace phalanx::cli {
namespace {

void print_now(const std::string& text) {
  if (std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0) throw Error("cannot write to standard output");
}

void write_files(const BenchArguments& parsed, const measure::CommBenchResult& result) {
  if (!parsed.csv.empty()) write_file(parsed.csv, measure::to_csv(result));
  if (!parsed.json.empty()) write_file(parsed.json, measure::to_json(result));
  if (!parsed.plot.empty()) write_file(parsed.plot, measure::comm_bench_plot(result));
}

}  // namespace

int bench_worker(const Arguments& arguments, const std::vector<measure::BenchBaseline>& baselines) {
  const BenchArguments parsed = parse_bench_arguments(arguments);
  // Kept until the process ends, so that a late second signal finds the handler; see train_worker.cc.
  static const train::StopSignal stop({.in_steps = false});
  announce_graceful_stop(std::chrono::seconds(3));
  const ProcessContext context = init_from_environment(
      {.backend = measure::world_backend(parsed.options, baselines), .device = parsed.options.device});
  announce_graceful_stop(std::chrono::seconds(60));
  stop.set_in_steps(true);
  const bool tells = context.rank == 0;
  // Find out now, before minutes of measuring, whether the files can be written.
  if (tells) write_files(parsed, {});
  const auto result = measure::run_comm_bench(
      context, parsed.options,
      {.on_start = [](const measure::CommBenchResult& start) { print_now(measure::table_header(start)); },
       .on_row = [&](const auto& row, const auto& baselines) { print_now(measure::table_line(row, baselines)); },
       .stop_requested = [] { return stop.requested(); },
       .baselines = baselines});
  if (!tells) return 0;
  for (const std::string& note : result.notes) print_now(fmt::format("# {}\n", note));
  if (result.stopped) {
    print_now(fmt::format("# stopped by a signal: {} row{} measured\n", result.rows.size(),
                          result.rows.size() == 1 ? "" : "s"));
  }
  write_files(parsed, result);
  const auto is_wrong = [](const measure::CommBenchRow& row) { return row.wrong.value_or(0) != 0; };
  const auto wrong = std::ranges::count_if(result.rows, is_wrong);
  if (wrong > 0)
    throw Error(fmt::format("{} of {} rows gave wrong results: see column 'wrong'", wrong, result.rows.size()));
  return 0;
}

}  // namespace phalanx::cli
