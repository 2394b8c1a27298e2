// Layout: one way to distribute a model and its batch over ranks: the mesh and the options chosen with it. It does not
// use torch.
//
//   const Layout layout{.parallel = {.dp_shard = 4, .tp = 2}, .batch = 2, .passes = 4};
//   name_of(layout);                                          // dp_shard=4,zero=3,tp=2,batch=2
//   predict_memory(apply_layout(base, layout));               // base: TrainingShape of model, sequence and precision
//   for (const Setting& s : settings_of(layout)) set(s);      // configuration keys of a run with this layout
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
  std::int64_t passes = 1;  // of a data-parallel rank per step: accumulated, or a pipeline's micro-batches
  bool reshard_after_forward = true;
  std::int64_t reshard_group = 0;
  bool reduces_each_microbatch = true;
  std::int64_t recompute_every = 0;  // see TrainingShape
  bool uses_op_sac = false;
  std::string schedule = "1F1B";
  std::int64_t stages_per_rank = 0;       // 0: the usual number for the schedule
  std::string context_exchange = "keys";  // or "heads", "ring"
  std::string exchange_reason;            // empty: it was asked for

  std::int64_t global_batch() const noexcept { return batch * passes * parallel.data_parallel_size(); }
};

/// Returns `base` with everything that the layout decides. From `base` it takes the model, the sequence length, the
/// optimizer, and the types as they are under sharding: if nothing is sharded, weights that would be unsharded in 16
/// bits are multiplied under autocast instead. Throws ConfigError if the schedule cannot have these numbers.
TrainingShape apply_layout(const TrainingShape& base, const Layout& layout);

/// The name that `phalanx verify --layout` and `phalanx bench train --layouts` accept; "one rank" if all are defaults.
std::string name_of(const Layout& layout);

/// The common name: "one rank", "data parallelism", "ZeRO-1", "tensor parallelism",
/// "context parallelism", "tensor and context parallelism", "pipeline", "pipeline with sharded stages"; the last two
/// also "and context parallelism", "and tensor parallelism". With expert parallelism followed by ", experts divided".
std::string kind_of(const ParallelPlan& plan);

struct Setting {
  std::string section, key, value;  // value in TOML syntax
};
/// In the order of a configuration file.
std::vector<Setting> settings_of(const Layout& layout);

}  // namespace phalanx::plan
