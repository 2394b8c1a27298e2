// RunPlan: how the ranks of a run share the model, and how one optimizer step is made of batches.
//
//   const RunPlan plan = plan_run(config, world_size);            // ConfigError: equation, numbers, nearest valid
//   choices plan.parallel.text();                                         // dp_shard=2 (ZeRO-3) x tp=2 (sequence
//   parallel) plan.global_batch_size == plan.local_batch_size * plan.accumulation_steps * plan.parallel.data_parallel_size();
//
// Checks the model's numbers too. Knows no tensor: the front program refuses what does not fit before a rank starts.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "phalanx/config/config.h"
#include "phalanx/config/config_problems.h"
#include "phalanx/layout/parallel_plan.h"
#include "phalanx/schedule/generators.h"

namespace phalanx::train {

struct RunPlan {
  std::int64_t world_size = 1;
  ParallelPlan parallel;
  std::int64_t local_batch_size = 1;    // sequences in one forward pass of one rank
  std::int64_t accumulation_steps = 1;  // forward passes of one rank before a step
  std::int64_t global_batch_size = 1;   // of a step
  std::int64_t micro_batches = 1;       // of a pipeline: of one forward pass of one data rank, which is a whole step's
};

/// Throws the first thing that is wrong.
RunPlan plan_run(const TrainConfig& config, std::int64_t world_size);

/// All that is wrong, but for what stands on `wrong_keys` or on another problem. The plan where there is one.
std::optional<RunPlan> collect_plan(const TrainConfig& config, std::int64_t world_size,
                                    const std::set<std::string>& wrong_keys, ConfigProblems& problems);

/// Of the pipeline of such a run.
schedule::ScheduleOptions schedule_options(const TrainConfig& config, const RunPlan& plan);

}  // namespace phalanx::train
