// The benchmark of the collectives: what `phalanx bench comm` runs on every rank.
//
// For each case (verb, type, op, place, size) the backends take turns, options.rounds times, with the copy roofline
// among them; of each the round with the smallest median stands: the one that other programs disturbed least. Every
// call is timed alone on every rank; a row's figures are the slowest rank's.
//
// Collective over context.world, which agrees on counts and gathers the figures and is itself measured only as "auto"
// (through a communicator split from it). `on_row` is called on rank 0 as soon as a case's rows are complete.
// `stop_requested` may become true on any rank at any time: all ranks then leave together, within a fraction of a
// second or the call that they are in, and the result holds what was done: of a measurement that was cut short the
// calls made so far, where there is no better. Throws UsageError for a backend that is not known, CommError as
// communicators do.
//
//   const auto result = run_comm_bench(context, options, {.on_row = [](const auto& row, const auto& peers) { ... }});
#pragma once

#include <functional>

#include "phalanx/launch/process_context.h"
#include "phalanx/measure/collectives/comm_bench_call.h"
#include "phalanx/measure/comm_bench_options.h"
#include "phalanx/measure/comm_bench_output.h"

namespace phalanx::measure {

struct CommBenchHooks {
  std::function<void(const CommBenchResult&)> on_start = {};  // rank 0: all but rows and notes is known
  /// Rank 0: a row, and the names of the peers that the table compares with.
  std::function<void(const CommBenchRow&, const std::vector<std::string>& baselines)> on_row = {};
  std::function<bool()> stop_requested = {};  // any rank, of backend "local" from several threads at once
  std::vector<BenchBaseline> baselines = {};  // that options.backends may name beside "c10d"
};

/// The rows are complete on rank 0 only.
CommBenchResult run_comm_bench(const ProcessContext& context, const CommBenchOptions& options,
                               const CommBenchHooks& hooks = {});

/// The backend that init_from_environment() must be asked for, so that options.backends can be measured; the names of
/// peers among them are no backends.
std::string world_backend(const CommBenchOptions& options, const std::vector<BenchBaseline>& baselines = {});

}  // namespace phalanx::measure
