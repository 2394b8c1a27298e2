// For tests of the kernels' host build: arrays of any type, and how far a value may lie from a reference in double.
//
// Tolerances. One unit in the last place of the type that a value is stored in, since the reference may lie beside the
// middle between two values; and for each of the float operations before it, 2^-22 of the largest of its terms: a few
// units of float. The sums in the tests are short, and add in trees.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "phalanx/kernels/gpu/gpu_kernels.h"
#include "phalanx/kernels/gpu/storage.h"

namespace phalanx::kernels::gpu::testing_support {

inline constexpr Type kTypes[] = {Type::f32, Type::bf16, Type::f16};
inline constexpr float kEps = 1e-5f;  // of the norms
inline constexpr double kFloatError = 0x1p-22;
inline const double kNan = std::numeric_limits<double>::quiet_NaN();

inline int fraction_bits(Type type) { return type == Type::f32 ? 23 : type == Type::bf16 ? 7 : 10; }

/// The distance of the type's values around x.
inline double ulp(Type type, double x) {
  const int smallest = type == Type::f16 ? -14 : -126;
  return std::ldexp(1.0, std::max(x == 0.0 ? smallest : std::ilogb(x), smallest) - fraction_bits(type));
}

/// The value of the type nearest to x; of two, the even one. For x within its range.
inline double nearest(Type type, double x) { return std::nearbyint(x / ulp(type, x)) * ulp(type, x); }

/// An array of any type, `offset` elements past an address that is a multiple of 16 bytes.
class Array {
 public:
  Array(Type type, std::int64_t count, std::int64_t offset = 0)
      : type_(type),
        size_(type == Type::f32 ? 4 : 2),
        count_(count),
        memory_(static_cast<std::size_t>(count * size_ + 48)) {
    begin_ =
        (16 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 16) % 16 + static_cast<std::size_t>(offset * size_);
  }
  /// Values between -1 and 1, of the type.
  static Array random(Type type, std::int64_t count, int seed, std::int64_t offset = 0) {
    Array made(type, count, offset);
    std::mt19937 generator(static_cast<unsigned>(seed));
    std::uniform_real_distribution<double> values(-1.0, 1.0);
    for (std::int64_t i = 0; i < count; ++i) made.set(i, values(generator));
    return made;
  }

  Type type() const { return type_; }
  std::int64_t count() const { return count_; }
  void* data() { return memory_.data() + begin_; }
  float* floats() { return static_cast<float*>(data()); }
  void* at(std::int64_t i) { return memory_.data() + begin_ + i * size_; }
  void set(std::int64_t i, double value) {
    const float f = static_cast<float>(value);
    if (type_ == Type::f32) *static_cast<float*>(at(i)) = f;
    if (type_ == Type::bf16) *static_cast<Bf16*>(at(i)) = from_float<Bf16>(f);
    if (type_ == Type::f16) *static_cast<F16*>(at(i)) = from_float<F16>(f);
  }
  double operator[](std::int64_t i) {
    if (type_ == Type::f32) return static_cast<double>(*static_cast<float*>(at(i)));
    if (type_ == Type::bf16) return static_cast<double>(to_float(*static_cast<Bf16*>(at(i))));
    return static_cast<double>(to_float(*static_cast<F16*>(at(i))));
  }

 private:
  Type type_;
  std::int64_t size_, count_;
  std::size_t begin_ = 0;
  std::vector<unsigned char> memory_;
};

inline std::string name_of(Type type) { return type == Type::f32 ? "f32" : type == Type::bf16 ? "bf16" : "f16"; }

/// Whether `got` is `want` but for its rounding to its type and an error of float arithmetic with such terms.
inline ::testing::AssertionResult close(Type type, double got, double want, double terms) {
  const double tolerance = ulp(type, want) + kFloatError * terms;
  if (std::abs(got - want) <= tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << got << " in place of " << want << ", with a tolerance of " << tolerance;
}

/// Types of arguments of the norms.
struct NormTypes {
  Type x, weight, y, delta;
};
inline constexpr NormTypes kNormTypes[] = {
    {Type::f32, Type::f32, Type::f32, Type::f32},   {Type::bf16, Type::bf16, Type::bf16, Type::bf16},
    {Type::f16, Type::f16, Type::f16, Type::f16},   {Type::f32, Type::f32, Type::bf16, Type::bf16},
    {Type::f32, Type::bf16, Type::f16, Type::f16},  {Type::bf16, Type::f32, Type::bf16, Type::f32},
    {Type::bf16, Type::f32, Type::f32, Type::bf16}, {Type::f16, Type::f32, Type::f32, Type::f16},
};

}  // namespace phalanx::kernels::gpu::testing_support
