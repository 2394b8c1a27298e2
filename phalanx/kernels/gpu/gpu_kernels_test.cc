// What all kernels share: stored types, arguments that are refused, and nothing to do.
#include "phalanx/kernels/gpu/testing/gpu_kernels_test_support.h"

#include <bit>
#include <vector>

#include "phalanx/base/philox.h"

namespace phalanx::kernels::gpu {
namespace {

using namespace testing_support;

template <class T>
void expect_exact_conversions(Type type, std::uint16_t infinity) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float value = to_float(T{static_cast<std::uint16_t>(bits)});
    if ((bits & 0x7fffu) > infinity) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      EXPECT_TRUE(std::isnan(to_float(from_float<T>(value)))) << bits;
      continue;
    }
    ASSERT_EQ(from_float<T>(value).bits, bits);
    if ((bits & 0x7fffu) + 1 >= infinity) continue;
    const float next = to_float(T{static_cast<std::uint16_t>(bits + 1)}), middle = value / 2 + next / 2;
    ASSERT_EQ(static_cast<double>(next) - static_cast<double>(value),
              std::copysign(ulp(type, static_cast<double>(value)), static_cast<double>(next)));
    const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(from_float<T>(middle).bits, even) << bits;
    ASSERT_EQ(from_float<T>(std::nextafter(middle, value)).bits, bits);
    ASSERT_EQ(from_float<T>(std::nextafter(middle, next)).bits, bits + 1);
  }
  EXPECT_EQ(from_float<T>(std::numeric_limits<float>::max()).bits, infinity);
  EXPECT_EQ(from_float<T>(-std::numeric_limits<float>::infinity()).bits, infinity | 0x8000u);
}

TEST(GpuKernels, StoredTypesRoundToNearestEven) {
  expect_exact_conversions<Bf16>(Type::bf16, 0x7f80);
  expect_exact_conversions<F16>(Type::f16, 0x7c00);
}

TEST(GpuKernels, WrongArgumentsAreRefused) {
  const GpuKernels& k = host_kernels();
  Array a(Type::f32, 64);
  float* const f = a.floats();
  const std::int64_t label = 0;
  const auto unknown = static_cast<Type>(7);
  const RotateJob job{f, 0, 0, 0, 1, f};
  const RotateAngles angles{f, f, false, 1.0f};
  const ConstTensor negative{-1, f};
  const AdamWTensor tensor{1, f, f, f, f, nullptr, f};
  EXPECT_STREQ(k.rms_norm(nullptr, 1, 4, Type::bf16, f, Type::f32, f, kEps, Type::f16, f, f),
               "rms_norm: y's type must be f32 or x's, or x f32");
  EXPECT_NE(k.rms_norm(nullptr, 1, 4, Type::f32, f, unknown, f, kEps, Type::f32, f, f), nullptr);
  EXPECT_NE(k.rms_norm(nullptr, -1, 4, Type::f32, f, Type::f32, f, kEps, Type::f32, f, f), nullptr);
  EXPECT_NE(k.rms_norm(nullptr, 1, std::int64_t{1} << 40, Type::f32, f, Type::f32, f, kEps, Type::f32, f, f), nullptr);
  EXPECT_NE(k.add_rms_norm(nullptr, 1, 4, Type::f32, f, Type::f32, nullptr, f, Type::f32, f, kEps, Type::f32, f, f),
            nullptr);
  EXPECT_NE(k.rms_norm_backward(nullptr, 1, 4, Type::f32, f, Type::f32, f, f, Type::f32, f, nullptr, f, Type::f32,
                                nullptr, f, 0),
            nullptr);
  EXPECT_NE(k.rms_norm_backward(nullptr, 1, 4, Type::f16, f, Type::f32, f, f, Type::bf16, f, nullptr, f, Type::f32,
                                nullptr, f, 1),
            nullptr);
  EXPECT_NE(k.column_sums(nullptr, -1, 4, f, Type::f32, f), nullptr);
  EXPECT_NE(k.column_sums(nullptr, 1, 4, f, unknown, f), nullptr);
  EXPECT_NE(k.rotate(nullptr, 1, 1, 3, Type::f32, angles, &job, 1), nullptr);
  EXPECT_NE(k.rotate(nullptr, 1, 1, 4, Type::f32, angles, &job, 3), nullptr);
  EXPECT_NE(k.rotate(nullptr, 1 << 16, 1 << 16, 4, Type::f32, angles, &job, 1), nullptr);
  EXPECT_NE(k.swiglu(nullptr, -1, 4, Type::f32, f, 4, f, 4, f), nullptr);
  EXPECT_NE(k.swiglu_backward(nullptr, 1, 4, unknown, f, 4, f, 4, f, f, 4, f, 4, f), nullptr);
  EXPECT_NE(k.cross_entropy(nullptr, 1, 8, 7, Type::f32, f, &label, 1.0f, 0.0f, f), nullptr);
  EXPECT_NE(k.cross_entropy(nullptr, 1, 0, 8, Type::f32, f, &label, 1.0f, 0.0f, f), nullptr);
  EXPECT_NE(k.adamw(nullptr, 1, &tensor, {1, 0, 0, 0, 0, unknown, Type::f32, nullptr, nullptr}), nullptr);
  EXPECT_NE(k.adamw(nullptr, 1, &tensor, {1, 0, 0, 0, 0, Type::f32, unknown, nullptr, nullptr}), nullptr);
  EXPECT_NE(k.squares(nullptr, 1, &negative, Type::f32, nullptr), nullptr);
  EXPECT_NE(k.total(nullptr, -1, nullptr, nullptr), nullptr);
  EXPECT_STREQ(k.uniform(nullptr, {.rows = 1, .columns = 4, .first = -1, .row_stride = 4, .out = f}),
               "uniform: rows, columns, first or row_stride is negative");
  for (int i = 0; i < 64; ++i) EXPECT_EQ(a[i], 0.0);
}

TEST(GpuKernels, UniformNumbersAreThoseOfTheStream) {
  const std::uint64_t key = 0x123456789abcdef0;
  const PhiloxKey philox_key = {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
  for (const std::int64_t columns : {1, 2, 3, 4, 5, 8, 1023}) {
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{3}, (std::int64_t{1} << 34) - 2}) {
      const std::int64_t rows = 3, stride = columns + 7;
      std::vector<float> out(static_cast<std::size_t>(rows * columns + 1), -1.0f);
      EXPECT_EQ(host_kernels().uniform(nullptr, {.key = key,
                                                 .rows = rows,
                                                 .columns = columns,
                                                 .first = first,
                                                 .row_stride = stride,
                                                 .low = 0.5f,
                                                 .high = 2.0f,
                                                 .out = out.data()}),
                nullptr);
      for (std::int64_t i = 0; i < rows * columns; ++i) {
        const auto element = static_cast<std::uint64_t>(first + i / columns * stride + i % columns);
        const auto counter = element / 4;
        const std::uint32_t word =
            philox4x32({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0, 0},
                       philox_key)[element % 4];
        const float unit = static_cast<float>(word >> 8) * 0x1p-24f;
        ASSERT_EQ(out[static_cast<std::size_t>(i)], 0.5f + 1.5f * unit) << columns << " " << first << " " << i;
      }
      EXPECT_EQ(out.back(), -1.0f);
    }
  }
}

TEST(GpuKernels, NothingToDoIsNoError) {
  const GpuKernels& k = host_kernels();
  const RotateJob job{nullptr, 0, 0, 0, 1, nullptr};
  EXPECT_EQ(k.rms_norm(nullptr, 0, 4, Type::f32, nullptr, Type::f32, nullptr, kEps, Type::f32, nullptr, nullptr),
            nullptr);
  EXPECT_EQ(k.rotate(nullptr, 0, 4, 4, Type::f32, {nullptr, nullptr, false, 1.0f}, &job, 1), nullptr);
  EXPECT_EQ(k.swiglu(nullptr, 4, 0, Type::f32, nullptr, 0, nullptr, 0, nullptr), nullptr);
  EXPECT_EQ(k.cross_entropy(nullptr, 0, 4, 4, Type::f32, nullptr, nullptr, 1.0f, 0.0f, nullptr), nullptr);
  EXPECT_EQ(k.adamw(nullptr, 0, nullptr, {1, 0, 0, 0, 0, Type::f32, Type::f32, nullptr, nullptr}), nullptr);
  EXPECT_EQ(k.increment(nullptr, 0, nullptr, nullptr), nullptr);
  EXPECT_EQ(k.squares(nullptr, 0, nullptr, Type::f32, nullptr), nullptr);
  EXPECT_EQ(k.uniform(nullptr, {.key = 1, .rows = 0, .columns = 4}), nullptr);
  // Without rows the weight's gradient is 0.
  Array partial = Array::random(Type::f32, 3 * 8, 1);
  EXPECT_EQ(k.rms_norm_backward(nullptr, 0, 8, Type::f32, nullptr, Type::f32, partial.floats(), nullptr, Type::f32,
                                nullptr, nullptr, nullptr, Type::f32, nullptr, partial.floats(), 3),
            nullptr);
  for (int i = 0; i < 3 * 8; ++i) EXPECT_EQ(partial[i], 0.0);
}

}  // namespace
}  // namespace phalanx::kernels::gpu
