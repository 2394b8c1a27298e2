// The memory of one pipeline rank over time: its stages' activations and gradients, action by action of its schedule.
// See memory_model.h.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

/// Where gradients are accumulated: in tensors that the passes make, or where data parallelism needs them, in the
/// buckets of each stage or in the units that it is sharded in.
enum class GradientStorage : std::uint8_t { tensors, buckets, units };

struct PipelineMemorySample {
  std::int64_t activations = 0;
  std::int64_t gradients = 0;  // made so far; for buckets: those that are rebuilt beside the others; else 0
};

/// One sample during each pass of the rank, and one at the end of the step.
std::vector<PipelineMemorySample> pipeline_memory_timeline(const TrainingShape& shape, std::size_t rank,
                                                           GradientStorage storage);

}  // namespace phalanx::plan
