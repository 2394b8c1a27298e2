// The units that a Llama, or a part of one, is sharded in. They are those of Llama::shard_units() and
// fsdp::find_units(), from shapes only. For memory_model.h.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/layout/flat_layout.h"
#include "phalanx/models/config/llama_part.h"
#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

struct UnitShape {
  std::vector<fsdp::FlatParameter> parameters;  // after tensor parallelism
  std::int64_t count = 1;                       // units of this shape
  bool is_root = false;                         // stays unsharded on every rank, with its gradients
};

std::vector<UnitShape> unit_shapes(const TrainingShape& shape, const models::LlamaPart& part);

}  // namespace phalanx::plan
