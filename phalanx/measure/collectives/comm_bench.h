// The collectives benchmark: what every rank of `phalanx bench comm` runs.
//
// For each case (verb, type, op, place, size) the backends and the copy roofline take turns, options.rounds times. For
// each backend the round with the smallest median counts: other programs disturbed it least. Every call is timed alone
// on every rank. The values of a row are those of the slowest rank.
//
//   const auto result = run_comm_bench(
//       context, options, {.on_row = [](const auto& row, const auto& baselines) { print(row, baselines); }});
#pragma once

#include <functional>

#include "phalanx/launch/process_context.h"
#include "phalanx/measure/collectives/comm_bench_call.h"
#include "phalanx/measure/comm_bench_options.h"
#include "phalanx/measure/comm_bench_output.h"

namespace phalanx::measure {

struct CommBenchHooks {
  std::function<void(const CommBenchResult&)> on_start = {};  // on rank 0: all but rows and notes is known
  /// On rank 0, as soon as a case's rows are complete: a row, and the names of the baselines in the table.
  std::function<void(const CommBenchRow&, const std::vector<std::string>& baselines)> on_row = {};
  /// On any rank; with the backend "local" it is called from several threads at once. It may become true on any rank at
  /// any time. All ranks then stop together, within a fraction of a second or after the call that they are in. The
  /// result holds what was done. Of a measurement that was cut short it holds the calls so far, if there is no better.
  std::function<bool()> stop_requested = {};
  std::vector<BenchBaseline> baselines = {};  // baselines that options.backends may name beside "c10d"
};

/// Runs the benchmark. The rows are complete on rank 0 only. context.world agrees on counts and gathers the results; it
/// is itself measured only as "auto", through a communicator split from it.
/// Throws UsageError for an unknown backend, and CommError as communicators do.
/// REQUIRES: all ranks of context.world call it (it is collective).
CommBenchResult run_comm_bench(const ProcessContext& context, const CommBenchOptions& options,
                               const CommBenchHooks& hooks = {});

/// The backend to pass to init_from_environment() so that options.backends can be measured. Names of baselines in
/// options.backends are ignored.
std::string world_backend(const CommBenchOptions& options, const std::vector<BenchBaseline>& baselines = {});

}  // namespace phalanx::measure
