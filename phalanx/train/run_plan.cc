#include "phalanx/train/run_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/train/model_config.h"

namespace phalanx::train {
namespace {

std::string ranks_text(std::int64_t count) { return fmt::format("{} rank{}", count, count == 1 ? "" : "s"); }

/// -1 stands for the ranks that the other degrees leave; with both at -1 all of them shard.
ParallelPlan degrees_of(const TrainConfig& config, std::int64_t world_size) {
  const auto& given = config.parallelism;
  ParallelPlan plan{.dp_replicate = given.data_parallel_replicate_degree,
                    .dp_shard = given.data_parallel_shard_degree,
                    .tp = given.tensor_parallel_degree,
                    .zero_stage = static_cast<int>(given.zero_stage),
                    .sequence_parallel = given.enable_sequence_parallel};
  if (world_size % plan.tp != 0) {
    std::string choices;
    for (std::int64_t degree = 1; degree <= world_size; ++degree) {
      if (world_size % degree == 0) choices += fmt::format("{}{}", choices.empty() ? "" : ", ", degree);
    }
    throw ConfigError(fmt::format("[parallelism] tensor_parallel_degree {} does not divide the {}; degrees that do: {}",
                                  plan.tp, ranks_text(world_size), choices));
  }
  const std::int64_t left = world_size / plan.tp;
  if (plan.dp_shard == -1) plan.dp_shard = left / std::max<std::int64_t>(1, plan.dp_replicate);
  if (plan.dp_replicate == -1) plan.dp_replicate = left / std::max<std::int64_t>(1, plan.dp_shard);
  if (plan.dp_replicate * plan.dp_shard != left || plan.dp_shard < 1) {
    const std::string of_tp =
        plan.tp > 1 ? fmt::format(" / tensor_parallel_degree {} = {}", plan.tp, left) : std::string();
    throw ConfigError(
        fmt::format("[parallelism] data_parallel_replicate_degree {} x data_parallel_shard_degree {} do not make {}{}: "
                    "their product must be the number of ranks{}; -1 for one of them takes what the other leaves",
                    given.data_parallel_replicate_degree, given.data_parallel_shard_degree, ranks_text(world_size),
                    of_tp, plan.tp > 1 ? " that tensor parallelism leaves" : ""));
  }
  return plan;
}

void check_batch(std::int64_t global, std::int64_t local, std::int64_t ranks) {
  const std::int64_t unit = local * ranks;
  if (global % unit == 0) return;
  std::string choices = fmt::format("global_batch_size {}", std::max<std::int64_t>(1, global / unit) * unit);
  if (global > unit) choices += fmt::format(" or {}", (global / unit + 1) * unit);
  if (global % ranks == 0) {
    // The largest local batch below the given one that divides a rank's share.
    std::int64_t fitting = std::min(local, global / ranks);
    while ((global / ranks) % fitting != 0) --fitting;
    choices += fmt::format(", or local_batch_size {}", fitting);
  }
  throw ConfigError(fmt::format(
      "[training] global_batch_size {} is not a multiple of local_batch_size {} x {} ranks = {}: nearest valid: {}",
      global, local, ranks, unit, choices));
}

}  // namespace

RunPlan plan_run(const TrainConfig& config, std::int64_t world_size) {
  const models::LlamaConfig model = model_config(config);
  const ParallelPlan parallel = degrees_of(config, world_size);
  check(parallel,
        {.n_layers = model.n_layers,
         .n_heads = model.n_heads,
         .n_kv_heads = model.n_kv_heads,
         .ffn_hidden = model.ffn_hidden,
         .vocab_size = model.vocab_size,
         .seq_len = config.training.seq_len},
        world_size, {.tp = "[parallelism] tensor_parallel_degree", .sequence_parallel = "enable_sequence_parallel"});
  if (parallel.dp_shard == 1 && config.training.enable_cpu_offload) {
    throw ConfigError(fmt::format(
        "[training] enable_cpu_offload is for sharded training, but of {} none shares the model with another: "
        "start more, or remove it",
        ranks_text(world_size)));
  }
  if (const std::int64_t group = reshard_group(config); group > 0 && parallel.dp_shard % group != 0) {
    throw ConfigError(fmt::format(
        "[parallelism] fsdp_reshard_after_forward = {} does not divide the {} ranks among which the model is sharded",
        group, parallel.dp_shard));
  }
  const std::int64_t local = config.training.local_batch_size;
  const std::int64_t unit = local * parallel.data_ranks();
  const std::int64_t global = config.training.global_batch_size == -1 ? unit : config.training.global_batch_size;
  check_batch(global, local, parallel.data_ranks());
  return {.world_size = world_size,
          .parallel = parallel,
          .local_batch_size = local,
          .accumulation_steps = global / unit,
          .global_batch_size = global};
}

}  // namespace phalanx::train
