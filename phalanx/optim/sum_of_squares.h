// Sum of squares of float32 values in float64, in an order that depends only on `count`.
//
// The product of two float32 values is exact in float64. So fused and separate multiply-add agree, and every
// instruction set gives the same bits.
#pragma once

#include <cstddef>

namespace phalanx {

/// Longer rows are cut at multiples of this many elements, and the parts' sums are added exactly (row_squares.h).
inline constexpr std::size_t kSumOfSquaresBlock = 32768;

double sum_of_squares(const float* values, std::size_t count);

}  // namespace phalanx
