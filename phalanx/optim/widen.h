// 16-bit values beside their float32 masters, in memory: what an optimizer's step does with them, element by element.
//
// dtype is at::kBFloat16 or at::kHalf everywhere. Rounding is to the nearest, ties to even.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

namespace phalanx {

inline bool is_16_bit(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half;
}

void widen(c10::ScalarType dtype, std::size_t count, const void* from, float* to);
void narrow(c10::ScalarType dtype, std::size_t count, const float* from, void* to);
void multiply(std::size_t count, float* values, float factor);
/// Where a master does not round to its value any more, somebody has written the value: the master starts from it.
void adopt_changes(c10::ScalarType dtype, std::size_t count, const void* values, float* masters);

}  // namespace phalanx
