#include "phalanx/lecture/levels.h"

#include <algorithm>

namespace phalanx::lecture {

bool is_told_apart(const std::vector<measure::MemoryLevel>& levels, std::size_t level) {
  return std::all_of(levels.begin() + static_cast<std::ptrdiff_t>(level) + 1, levels.end(),
                     [&](const measure::MemoryLevel& behind) { return levels[level].one_cpu > behind.one_cpu; });
}

std::vector<measure::MemoryLevel> fastest_of_measurements(
    const std::function<std::vector<measure::MemoryLevel>()>& measure) {
  constexpr int kMeasurements = 3;
  std::vector<measure::MemoryLevel> best = measure();
  const auto are_all_told_apart = [&] {
    bool all = true;
    for (std::size_t i = 0; i < best.size(); ++i) all = all && is_told_apart(best, i);
    return all;
  };
  for (int i = 1; i < kMeasurements && !are_all_told_apart(); ++i) {
    const std::vector<measure::MemoryLevel> levels = measure();
    for (std::size_t j = 0; j < best.size(); ++j) best[j].one_cpu = std::max(best[j].one_cpu, levels[j].one_cpu);
  }
  return best;
}

}  // namespace phalanx::lecture
