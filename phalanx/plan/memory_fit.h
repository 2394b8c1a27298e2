// Whether a predicted run fits into the memory that there is, what is missing if not, and what would make it fit.
//
// A limit counts in its own way: RLIMIT_DATA nothing that is shared between processes, RLIMIT_AS the other ranks' parts
// of shared windows as well, cgroups and machines all ranks on them together.
//
//   if (const auto shortage = find_shortage(predict_memory(shape), limits)) {
//     throw MemoryError(shortage_text(*shortage, predict_memory(shape)));
//   }
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/base/memory_limits.h"
#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

struct LimitOfRanks {
  MemoryLimit limit;
  std::int64_t ranks = 1;  // of this run, that take from it
  bool has_first = true;   // one of them is rank 0
};

struct MemoryShortage {
  LimitOfRanks limit;
  std::int64_t needed = 0;   // by one rank, as the limit counts
  std::int64_t more = 0;     // by rank 0, beside that, if there are others
  std::int64_t missing = 0;  // to all its ranks together
};

/// What the limit counts of rank 0's memory.
std::int64_t counted_by(const MemoryLimit& limit, const TrainingMemory& memory);
/// Of the limit that most is missing to; nothing where all hold.
std::optional<MemoryShortage> find_shortage(const TrainingMemory& memory, const std::vector<LimitOfRanks>& limits);

/// "needs 1.21 GiB, but ...": the numbers by category, the limit, the bytes missing.
std::string shortage_text(const MemoryShortage& shortage, const TrainingMemory& memory);
/// The same numbers where an allocation failed although nothing seemed to be missing.
std::string prediction_text(const TrainingMemory& memory);

/// What had been counted when an allocation failed, category by category, of what was predicted; several lines.
std::string comparison_text(const TrainingMemory& predicted, const observe::MemoryCounts& counted);

/// Changes of the configuration with which `fits` holds, each as its keys and what a rank then needs; the mildest of
/// each kind. Empty: none of them helps.
std::vector<std::string> remedies(const TrainingShape& shape, const std::function<bool(const TrainingMemory&)>& fits);

/// The one change that saves most, be it enough or not: sharding everything, recomputing everything, or the smallest
/// local batch. Empty: each of these is there already, or saves nothing.
std::string largest_saving(const TrainingShape& shape);

}  // namespace phalanx::plan
