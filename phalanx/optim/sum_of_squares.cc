#include "phalanx/optim/sum_of_squares.h"

#include "phalanx/optim/instruction_sets.h"

namespace phalanx {

PHALANX_INSTRUCTION_SETS
double sum_of_squares(const float* values, std::size_t count) {
  // Independent lanes: the order of additions is spelled out, so the compiler may use vectors without reordering.
  constexpr std::size_t kLanes = 16, kAhead = 512;
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    // A caller that sums row after row stalls at the end of each: prefetch what comes next.
    __builtin_prefetch(values + i + kAhead);
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
  double eight[8], four[4];  // in halves, each vector by vector
  for (std::size_t lane = 0; lane < 8; ++lane) eight[lane] = lanes[lane] + lanes[lane + 8];
  for (std::size_t lane = 0; lane < 4; ++lane) four[lane] = eight[lane] + eight[lane + 4];
  const double even = four[0] + four[2], odd = four[1] + four[3];
  return (even + odd) + tail;
}

}  // namespace phalanx
