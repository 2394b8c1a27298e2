// The units that a Llama, or a part of one, is sharded in: what Llama::shard_units() and fsdp::find_units() make, by
// shape alone. For memory_model.h.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/layout/flat_layout.h"
#include "phalanx/models/config/llama_part.h"
#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

struct UnitShape {
  std::vector<fsdp::FlatParameter> parameters;  // as the tensor group leaves them
  std::int64_t count = 1;                       // units that look like this
  bool is_root = false;                         // stays whole on every rank, with its gradients
};

std::vector<UnitShape> unit_shapes(const TrainingShape& shape, const models::LlamaPart& part);

}  // namespace phalanx::plan
