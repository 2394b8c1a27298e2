#include "phalanx/plan/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "phalanx/models/config/llama_part.h"
#include "phalanx/schedule/generators.h"

namespace phalanx::plan {
namespace {

// What must be set in a configuration. By default a pipeline's stages stay unsharded for a step, and all else is
// resharded.
const char* unusual_resharding(const Layout& layout) {
  const ParallelPlan& parallel = layout.parallel;
  const bool matters = parallel.is_sharded() && parallel.zero_stage == 3 && layout.reshard_group == 0;
  if (!matters || layout.reshard_after_forward == (parallel.pp == 1)) return nullptr;
  return layout.reshard_after_forward ? "always" : "never";
}

}  // namespace

TrainingShape apply_layout(const TrainingShape& base, const Layout& layout) {
  TrainingShape shape = base;
  const ParallelPlan& parallel = layout.parallel;
  shape.batch = layout.batch;
  shape.global_batch = layout.global_batch();
  shape.accumulates = layout.passes > 1;
  shape.reduces_each_microbatch = layout.reduces_each_microbatch;
  shape.replicas = parallel.replicas();
  shape.shards = parallel.shards();
  shape.expert_parallel_size = parallel.ep;
  shape.context_parallel_size = parallel.cp;
  shape.gathers_keys = layout.context_exchange == "keys";
  shape.exchanges_heads = layout.context_exchange == "heads";
  shape.zero_stage = parallel.zero_stage;
  shape.reshard_after_forward = layout.reshard_after_forward;
  shape.reshard_group = 0;
  shape.tensor_parallel_size = parallel.tp;
  shape.sequence_parallel = parallel.sequence_parallel;
  shape.recompute_every = layout.recompute_every;
  shape.uses_op_sac = layout.uses_op_sac;
  shape.pipeline.reset();
  if (parallel.pp > 1) {
    PipelineShape pipeline{
        .schedule = schedule::make_schedule({.name = layout.schedule,
                                             .ranks = static_cast<int>(parallel.pp),
                                             .stages_per_rank = static_cast<int>(layout.stages_per_rank),
                                             .micro_batches = static_cast<int>(layout.passes)}),
        .parts = {}};
    pipeline.parts = models::balance_llama(shape.model, pipeline.schedule.stages(), shape.seq);
    shape.pipeline = std::move(pipeline);
    shape.accumulates = false;
  }
  if (parallel.is_sharded()) {
    if (layout.reshard_group == 1) shape.reshard_after_forward = false;
    if (layout.reshard_group > 1 && layout.reshard_group < parallel.shards())
      shape.reshard_group = layout.reshard_group;
  } else {
    shape.autocast = shape.gather_bytes < shape.weight_bytes;
    shape.gather_bytes = shape.reduce_bytes = shape.weight_bytes;
    shape.offload = false;
  }
  return shape;
}

std::string name_of(const Layout& layout) {
  const ParallelPlan& parallel = layout.parallel;
  std::vector<std::string> parts;
  const auto add = [&](const char* key, std::int64_t number) {
    if (number > 1) parts.push_back(fmt::format("{}={}", key, number));
  };
  add("pp", parallel.pp);
  if (parallel.pp > 1 && layout.schedule != "1F1B") parts.push_back("schedule=" + layout.schedule);
  add("dp_replicate", parallel.dp_replicate);
  add("dp_shard", parallel.dp_shard);
  add("cp", parallel.cp);
  if (parallel.cp > 1 && layout.context_exchange != "keys") parts.push_back("exchange=" + layout.context_exchange);
  if (parallel.is_sharded()) parts.push_back(fmt::format("zero={}", parallel.zero_stage));
  if (const char* reshards = unusual_resharding(layout)) parts.push_back(fmt::format("reshard={}", reshards));
  add("ep", parallel.ep);
  add("tp", parallel.tp);
  if (parallel.tp > 1 && !parallel.sequence_parallel) parts.emplace_back("sp=off");
  if (layout.recompute_every > 0) parts.emplace_back(layout.uses_op_sac ? "ac=op" : "ac=full");
  parts.push_back(fmt::format("batch={}", layout.batch));
  return fmt::format("{}", fmt::join(parts, ","));
}

std::string kind_of(const ParallelPlan& plan) {
  if (plan.ep > 1) {
    ParallelPlan without = plan;
    without.ep = 1;
    return kind_of(without) + ", experts divided";
  }
  if (plan.pp > 1) {
    return fmt::format("pipeline{}{}{}", plan.is_sharded() ? " with sharded stages" : "",
                       plan.cp > 1 ? " and context parallelism" : "", plan.tp > 1 ? " and tensor parallelism" : "");
  }
  if (plan.tp > 1) return plan.cp > 1 ? "tensor and context parallelism" : "tensor parallelism";
  if (plan.cp > 1) return "context parallelism";
  if (plan.ranks() == 1) return "one rank";
  return plan.dp_shard == 1 ? "data parallelism" : fmt::format("ZeRO-{}", plan.zero_stage);
}

std::vector<Setting> settings_of(const Layout& layout) {
  const ParallelPlan& parallel = layout.parallel;
  std::vector<Setting> settings;
  const auto set = [&](const char* section, const char* key, auto value) {
    settings.push_back({section, key, fmt::format("{}", value)});
  };
  set("training", "local_batch_size", layout.batch);
  set("training", "global_batch_size", layout.global_batch());
  set("parallelism", "data_parallel_replicate_degree", parallel.dp_replicate);
  set("parallelism", "data_parallel_shard_degree",
      parallel.is_sharded() && parallel.dp_shard == 1 ? -1 : parallel.dp_shard);
  if (parallel.is_sharded()) set("parallelism", "zero_stage", parallel.zero_stage);
  if (const char* reshards = unusual_resharding(layout)) {
    set("parallelism", "fsdp_reshard_after_forward", fmt::format("\"{}\"", reshards));
  }
  if (parallel.cp > 1) {
    set("parallelism", "context_parallel_degree", parallel.cp);
    set("parallelism", "context_parallel_exchange", fmt::format("\"{}\"", layout.context_exchange));
  }
  if (parallel.ep > 1) set("parallelism", "expert_parallel_degree", parallel.ep);
  set("parallelism", "tensor_parallel_degree", parallel.tp);
  set("parallelism", "pipeline_parallel_degree", parallel.pp);
  if (parallel.pp > 1) {
    set("parallelism", "pipeline_parallel_schedule", fmt::format("\"{}\"", layout.schedule));
    set("parallelism", "pipeline_parallel_microbatch_size", layout.batch);
  }
  if (layout.recompute_every == 0) {
    set("activation_checkpoint", "mode", "\"none\"");
  } else if (layout.recompute_every == 1 && !layout.uses_op_sac) {
    set("activation_checkpoint", "mode", "\"full\"");
  } else {
    set("activation_checkpoint", "mode", "\"selective\"");
    set("activation_checkpoint", "selective_ac_option",
        layout.uses_op_sac ? "\"op\"" : fmt::format("\"{}\"", layout.recompute_every));
  }
  return settings;
}

}  // namespace phalanx::plan
