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
  std::vector<fsdp::FlatParameter> parameters;  // trained, after tensor parallelism
  std::vector<fsdp::FlatParameter> frozen;
  std::vector<fsdp::FlatParameter> in_nf4;  // frozen matrices in 4 bits with their scales, in bytes
  std::int64_t count = 1;                   // units of this shape
  std::int64_t matrices = 0;                // elements of trained matrices that have TrainingShape::matrix_copies
  bool is_root = false;                     // stays unsharded on every rank, with its gradients
  std::int64_t shards = 1;                  // ranks that share it
  bool is_inner = false;                    // experts that are divided among ranks: part of the unit before it
};

std::vector<UnitShape> unit_shapes(const TrainingShape& shape, const models::LlamaPart& part);

/// Elements on a rank, before they are sharded. Of experts that are divided among ranks its own.
struct ElementCounts {
  std::int64_t trained = 0, frozen = 0;
  std::int64_t matrices = 0;   // of the trained ones: UnitShape::matrices
  std::int64_t nf4_bytes = 0;  // beside these elements: UnitShape::in_nf4
  std::int64_t all() const noexcept { return trained + frozen; }
  void add(const ElementCounts& one, std::int64_t times = 1) noexcept {
    trained += times * one.trained;
    frozen += times * one.frozen;
    matrices += times * one.matrices;
    nf4_bytes += times * one.nf4_bytes;
  }
};
ElementCounts elements_of(const UnitShape& unit);  // of one unit of that shape
ElementCounts elements_of_part(const TrainingShape& shape, const models::LlamaPart& part);
/// With the experts of all ranks among which they are divided: a rank's shards are this divided by their number.
ElementCounts elements_of_all_experts(const TrainingShape& shape, const models::LlamaPart& part);
/// Whether the embedding or output matrix is trained. With tied embeddings they are one.
bool trains_embedding(const TrainingShape& shape);
bool trains_output(const TrainingShape& shape);

}  // namespace phalanx::plan
