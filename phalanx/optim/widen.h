// Conversions between 16-bit values and their float32 masters, in memory, for an optimizer's step.
//
// REQUIRES: dtype is at::kBFloat16 or at::kHalf everywhere. Rounding is to nearest, ties to even.
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
/// If a master no longer rounds to its value, other code has written the value: the master takes it over.
void adopt_changes(c10::ScalarType dtype, std::size_t count, const void* values, float* masters);

}  // namespace phalanx
