#include "phalanx/optim/widen.h"

#include <c10/util/Half.h>

#include <cstdint>

#include "phalanx/optim/instruction_sets.h"

namespace phalanx {
namespace {

// A bfloat16 is the upper half of a float32: in integers these loops become vector loops.

PHALANX_INSTRUCTION_SETS
void widen_bfloat16(std::size_t count, const std::uint16_t* __restrict from, float* __restrict to) {
  for (std::size_t i = 0; i < count; ++i) to[i] = __builtin_bit_cast(float, std::uint32_t{from[i]} << 16);
}

PHALANX_INSTRUCTION_SETS
void narrow_bfloat16(std::size_t count, const float* __restrict from, std::uint16_t* __restrict to) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = __builtin_bit_cast(std::uint32_t, from[i]);
    const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    to[i] = static_cast<std::uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);  // a NaN stays one
  }
}

PHALANX_INSTRUCTION_SETS
void adopt_bfloat16(std::size_t count, const std::uint16_t* __restrict values, float* __restrict masters) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = __builtin_bit_cast(std::uint32_t, masters[i]);
    std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    rounded = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded;
    masters[i] = __builtin_bit_cast(float, rounded == values[i] ? bits : std::uint32_t{values[i]} << 16);
  }
}

void widen_half(std::size_t count, const c10::Half* from, float* to) {
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

void narrow_half(std::size_t count, const float* from, c10::Half* to) {
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<c10::Half>(from[i]);
}

void adopt_half(std::size_t count, const c10::Half* values, float* masters) {
  for (std::size_t i = 0; i < count; ++i) {
    if (static_cast<c10::Half>(masters[i]).x != values[i].x) masters[i] = static_cast<float>(values[i]);
  }
}

}  // namespace

PHALANX_INSTRUCTION_SETS
void multiply(std::size_t count, float* values, float factor) {
  for (std::size_t i = 0; i < count; ++i) values[i] *= factor;
}

void widen(c10::ScalarType dtype, std::size_t count, const void* from, float* to) {
  if (dtype == c10::ScalarType::Half) return widen_half(count, static_cast<const c10::Half*>(from), to);
  widen_bfloat16(count, static_cast<const std::uint16_t*>(from), to);
}

void narrow(c10::ScalarType dtype, std::size_t count, const float* from, void* to) {
  if (dtype == c10::ScalarType::Half) return narrow_half(count, from, static_cast<c10::Half*>(to));
  narrow_bfloat16(count, from, static_cast<std::uint16_t*>(to));
}

void adopt_changes(c10::ScalarType dtype, std::size_t count, const void* values, float* masters) {
  if (dtype == c10::ScalarType::Half) return adopt_half(count, static_cast<const c10::Half*>(values), masters);
  adopt_bfloat16(count, static_cast<const std::uint16_t*>(values), masters);
}

}  // namespace phalanx
