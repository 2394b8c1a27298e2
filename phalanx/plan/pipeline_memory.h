// What one rank of a pipeline has at a time: its stages' activations and gradients, action by action of its schedule.
// See memory_model.h.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

struct PipelineMoment {
  std::int64_t activations = 0;
  std::int64_t gradients = 0;  // made so far; 0 where buckets hold them
};

/// During each pass of the rank. `has_buckets`: gradients are written where data parallelism wants them.
std::vector<PipelineMoment> pipeline_moments(const TrainingShape& shape, std::size_t rank, bool has_buckets);

}  // namespace phalanx::plan
