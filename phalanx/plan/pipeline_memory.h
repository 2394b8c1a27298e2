// What one rank of a pipeline has at a time: its stages' activations and gradients, action by action of its schedule.
// See memory_model.h.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

/// Where gradients are added up: in tensors that the passes make, or where data parallelism wants them, in the buckets
/// of each stage or in the units that it is sharded in.
enum class GradientStorage : std::uint8_t { tensors, buckets, units };

struct PipelineMemorySample {
  std::int64_t activations = 0;
  std::int64_t gradients = 0;  // made so far; of buckets, those that are laid out anew beside the others; else 0
};

/// During each pass of the rank, and at the end of the step.
std::vector<PipelineMemorySample> pipeline_memory_timeline(const TrainingShape& shape, std::size_t rank,
                                                           GradientStorage storage);

}  // namespace phalanx::plan
