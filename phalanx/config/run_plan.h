// RunPlan: how the ranks of a run share the model, and how one optimizer step is divided into batches.
//
//   const RunPlan plan = plan_run(config, world_size);   // ConfigError: equation, numbers, nearest valid choices
//   plan.parallel.text();                                // dp_shard=2 (ZeRO-3) x tp=2 (sequence parallel)
//   // plan.global_batch_size ==
//   //     plan.local_batch_size * plan.accumulation_steps * plan.parallel.data_parallel_size()
//
// It also checks the model's dimensions. It does not use torch: the command line refuses what does not fit before any
// rank starts.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "phalanx/config/config.h"
#include "phalanx/config/config_problems.h"
#include "phalanx/layout/parallel_plan.h"
#include "phalanx/plan/context_exchange.h"
#include "phalanx/schedule/generators.h"

namespace phalanx::config {

struct RunPlan {
  std::int64_t world_size = 1;
  ParallelPlan parallel;
  std::int64_t local_batch_size = 1;    // sequences in one forward pass of one rank
  std::int64_t accumulation_steps = 1;  // forward passes of one rank before a step
  std::int64_t global_batch_size = 1;   // of a step
  std::int64_t micro_batches = 1;  // of a pipeline, in one forward pass of a data-parallel rank: that is a whole step
  /// What attention exchanges under context parallelism.
  plan::ContextExchangeChoice exchange = {.name = "keys", .reason = ""};
  bool cuts_by_work = false;  // packed rows (layout/packed_cut.h)
  std::int64_t window = 0;    // of all layers; 0: none

  /// How `rank` of the world cuts the rows of batches. What has no documents at hand takes parallel.context_cut(), and
  /// is refused beside a cut by work.
  ContextCut context_cut(std::int64_t rank) const noexcept {
    ContextCut cut = parallel.context_cut(rank);
    cut.by_work = cuts_by_work;
    cut.window = window;
    return cut;
  }
};

/// Throws the first problem.
RunPlan plan_run(const TrainConfig& config, std::int64_t world_size);

/// Collects all problems, except those that depend on `wrong_keys` or follow from another problem. Returns the plan if
/// there is one.
std::optional<RunPlan> collect_plan(const TrainConfig& config, std::int64_t world_size,
                                    const std::set<std::string>& wrong_keys, ConfigProblems& problems);

/// Whether the loss that evens out the load of experts counts the tokens of all data ranks together.
bool counts_load_over_data_ranks(const TrainConfig& config);

/// Throws ConfigError if no run on one rank computes the same, with whatever batches.
void require_equivalent_on_one_rank(const TrainConfig& config, const RunPlan& plan);

/// The options of the pipeline schedule of such a run.
schedule::ScheduleOptions schedule_options(const TrainConfig& config, const RunPlan& plan);

}  // namespace phalanx::config
