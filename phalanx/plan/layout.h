// Layout: one way to share a model and its batch out over ranks: the mesh and what is chosen beside it. Knows no
// tensor.
//
//   const Layout layout{.parallel = {.dp_shard = 4, .tp = 2}, .batch = 2, .passes = 4};
//   name_of(layout);                                          // dp_shard=4,zero=3,tp=2,batch=2
//   predict_memory(apply_layout(base, layout));                   // base: TrainingShape of model, sequence and precision
//   for (const Setting& s : settings_of(layout)) ...          // keys of the configuration that make a run of it
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/layout/parallel_plan.h"
#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

struct Layout {
  ParallelPlan parallel;
  std::int64_t batch = 1;   // sequences of one forward pass; in a pipeline, of a micro-batch
  std::int64_t passes = 1;  // of a data rank before a step: accumulated, or a pipeline's micro-batches
  bool reshard_after_forward = true;
  std::int64_t reshard_group = 0;
  bool reduces_each_microbatch = true;
  std::int64_t recompute_every = 0;  // see TrainingShape
  bool uses_op_sac = false;
  std::string schedule = "1F1B";
  std::int64_t stages_per_rank = 0;  // 0: as many as is usual for the schedule

  std::int64_t global_batch() const noexcept { return batch * passes * parallel.data_parallel_size(); }
};

/// `base` with what the layout decides. Of `base` it takes the model, the sequence length, the optimizer, and the types
/// as they are under sharding: weights gathered in 16 bits are multiplied by autocast where nothing is sharded.
/// ConfigError where the schedule cannot have these numbers.
TrainingShape apply_layout(const TrainingShape& base, const Layout& layout);

/// As `phalanx verify --layout` and `phalanx bench train --layouts` take it; "one rank" where there is nothing to say.
std::string name_of(const Layout& layout);

/// What people call it: "one rank", "data parallelism", "ZeRO-1", "tensor parallelism", "pipeline", "pipeline with
/// sharded stages", the last two also "and tensor parallelism".
std::string kind_of(const ParallelPlan& plan);

struct Setting {
  std::string section, key, value;  // value as TOML has it
};
/// In the order of a configuration file.
std::vector<Setting> settings_of(const Layout& layout);

}  // namespace phalanx::plan
