#include "phalanx/schedule/schedule.h"

#include <cstddef>

namespace phalanx::schedule {

std::vector<int> Schedule::stages_of(int rank) const {
  std::vector<int> stages;
  for (int stage = 0; stage < this->stages(); ++stage) {
    if (rank_of_stage[static_cast<std::size_t>(stage)] == rank) stages.push_back(stage);
  }
  return stages;
}

}  // namespace phalanx::schedule
