// Decides whether a predicted run fits into the available memory, what is missing if not, and what would make it fit.
//
// Limits count in different ways: RLIMIT_DATA counts nothing that processes share, RLIMIT_AS also counts the other
// ranks' parts of shared windows, and cgroups and nodes count all their ranks together.
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
  std::int64_t ranks = 1;  // of this run, under this limit
  bool has_first = true;   // one of them is rank 0
};

struct MemoryShortage {
  LimitOfRanks limit;
  std::int64_t needed = 0;   // by one rank, as the limit counts
  std::int64_t more = 0;     // by rank 0, in addition, if there are other ranks
  std::int64_t missing = 0;  // for all ranks of the limit together
};

/// The part of rank 0's memory that the limit counts.
std::int64_t counted_by(const MemoryLimit& limit, const TrainingMemory& memory);
/// The shortage of the limit with the most missing; nothing if all limits hold.
std::optional<MemoryShortage> find_shortage(const TrainingMemory& memory, const std::vector<LimitOfRanks>& limits);

/// "needs 1.21 GiB, but ...": the numbers by category, the limit, the bytes missing.
std::string shortage_text(const MemoryShortage& shortage, const TrainingMemory& memory);
/// The same numbers, for an allocation that failed although no shortage was found.
std::string prediction_text(const TrainingMemory& memory);

/// What was counted when an allocation failed, beside what was predicted, by category; several lines.
std::string comparison_text(const TrainingMemory& predicted, const observe::MemoryCounts& counted);

/// Changes of the configuration for which `fits` is true, each as its keys and what a rank then needs; for each kind
/// the mildest. Empty: none of them helps.
std::vector<std::string> remedies(const TrainingShape& shape, const std::function<bool(const TrainingMemory&)>& fits);

/// The one change that saves most, whether it is enough or not: sharding everything, recomputing everything, or the
/// smallest local batch. Empty: each of these is already done, or saves nothing.
std::string largest_saving(const TrainingShape& shape);

}  // namespace phalanx::plan
