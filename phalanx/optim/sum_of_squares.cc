#include "phalanx/optim/sum_of_squares.h"

#include "phalanx/optim/instruction_sets.h"

namespace phalanx {

PHALANX_INSTRUCTION_SETS
double sum_of_squares(const float* values, std::size_t count) {
  // Independent lanes: the order of additions is spelled out, so the compiler may use vectors without reordering.
  constexpr std::size_t kLanes = 16;
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double x = values[i + lane];
      lanes[lane] += x * x;
    }
  }
  double tail = 0;
  for (; i < count; ++i) {
    const double x = values[i];
    tail += x * x;
  }
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0] + tail;
}

}  // namespace phalanx
