// How a matrix in NF4 (kernels/nf4.h) is divided into blocks. Torch-free.
#pragma once

#include <cstdint>

namespace phalanx {

inline constexpr std::int64_t kNf4Block = 64;         // elements of a row with one scale
inline constexpr std::int64_t kNf4NestedBlock = 256;  // scales with one scale

/// Scales of the scales of a matrix of so many elements.
constexpr std::int64_t nf4_nested_scales(std::int64_t elements) {
  return (elements / kNf4Block + kNf4NestedBlock - 1) / kNf4NestedBlock;
}
/// Their bytes: fp32 numbers, and behind them one more, the offset of the scales.
constexpr std::int64_t nf4_nested_bytes(std::int64_t elements) {
  return (nf4_nested_scales(elements) + 1) * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace phalanx
