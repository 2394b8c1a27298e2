// Casts to float8: the host build against plain arithmetic.
#include "phalanx/kernels/gpu/float8_body.h"
#include "phalanx/kernels/gpu/testing/gpu_kernels_test_support.h"

namespace phalanx::kernels::gpu::float8_test {
namespace {

using namespace testing_support;

struct Format {
  Float8Type type;
  int fraction_bits, smallest_exponent;
  double largest;
};
constexpr Format kFormats[] = {{Float8Type::e4m3, 3, -6, 448.0}, {Float8Type::e5m2, 2, -14, 57344.0}};

double number(const Format& format, unsigned char byte) {
  const int bits = format.fraction_bits, exponent = (byte & 0x7f) >> bits, fraction = byte & ((1 << bits) - 1);
  const bool is_e4m3 = format.type == Float8Type::e4m3;
  if ((byte & 0x7f) == 0x7f || (!is_e4m3 && exponent == 31)) return kNan;  // infinities are never made
  const double size = exponent == 0
                          ? std::ldexp(fraction, format.smallest_exponent - bits)
                          : std::ldexp((1 << bits) + fraction, exponent - 1 + format.smallest_exponent - bits);
  return (byte & 0x80) != 0 ? -size : size;
}

double nearest(const Format& format, double x) {
  if (std::isnan(x) || x == 0.0) return x;
  const double size = std::min(std::abs(x), format.largest);
  const double step = std::ldexp(1.0, std::max(std::ilogb(size), format.smallest_exponent) - format.fraction_bits);
  return std::copysign(std::nearbyint(size / step) * step, x);
}

unsigned char byte_of(const Format& format, float value) {
  return static_cast<unsigned char>(format.type == Float8Type::e4m3 ? float8_bits<E4m3>(value)
                                                                    : float8_bits<E5m2>(value));
}

TEST(GpuFloat8, RoundsToNearestEvenAndSaturates) {
  for (const Format& format : kFormats) {
    for (int byte = 0; byte < 256; ++byte) {
      const double value = number(format, static_cast<unsigned char>(byte));
      if (std::isnan(value)) continue;
      const auto f = static_cast<float>(value);
      ASSERT_EQ(byte_of(format, f), byte);
      if ((byte & 0x7f) == 0 || std::abs(value) == format.largest) continue;
      const auto next = static_cast<float>(number(format, static_cast<unsigned char>(byte + 1)));
      const float middle = f / 2 + next / 2;
      ASSERT_EQ(byte_of(format, middle), byte % 2 == 0 ? byte : byte + 1);
      ASSERT_EQ(byte_of(format, std::nextafter(middle, f)), byte);
      ASSERT_EQ(byte_of(format, std::nextafter(middle, next)), byte + 1);
    }
    const float infinity = std::numeric_limits<float>::infinity();
    EXPECT_EQ(number(format, byte_of(format, infinity)), format.largest);
    EXPECT_EQ(number(format, byte_of(format, -infinity)), -format.largest);
    EXPECT_EQ(number(format, byte_of(format, 1e30f)), format.largest);
    EXPECT_EQ(byte_of(format, 1e-30f), 0);
    EXPECT_TRUE(std::isnan(number(format, byte_of(format, std::numeric_limits<float>::quiet_NaN()))));
  }
}

/// What is expected of one value, times its scale.
double cast_value(const Format& format, double value, double amax, bool by_line, float& inverse) {
  auto scale = static_cast<float>(format.largest / std::max(amax, 1e-12));
  if (by_line) scale = std::ldexp(1.0f, std::ilogb(scale));
  inverse = 1.0f / scale;
  return nearest(format, static_cast<double>(static_cast<float>(value) * scale));
}

struct Case {
  Type type;
  std::int64_t rows, columns;
  bool via_bf16, by_line, plain, transposed;
};

void expect_cast(const Format& format, const Case& c) {
  Array x = Array::random(c.type, c.rows * c.columns, 7);
  const std::int64_t padded = (c.rows + 15) / 16 * 16, lines = c.by_line ? std::max(c.rows, c.columns) : 1;
  Array of_rows(Type::f32, lines), of_columns(Type::f32, lines), inverse(Type::f32, lines), inverse_t(Type::f32, lines);
  Array bytes(Type::f32, c.rows * c.columns / 4), turned(Type::f32, c.columns * padded / 4);
  const GpuKernels& k = host_kernels();
  for (std::int64_t i = 0; i < turned.count(); ++i) turned.set(i, kNan);
  ASSERT_EQ(
      k.float8_amax(nullptr, c.rows, c.columns, c.type, x.data(), c.via_bf16, c.by_line ? nullptr : of_rows.floats(),
                    c.by_line ? of_rows.floats() : nullptr, c.by_line ? of_columns.floats() : nullptr),
      nullptr);
  Float8CastJob job{c.rows, c.columns, c.type, x.data(), c.via_bf16, format.type, c.by_line, {}, {}};
  if (c.plain) job.plain = {bytes.data(), of_rows.floats(), inverse.floats()};
  if (c.transposed) {
    job.transposed = {turned.data(), c.by_line ? of_columns.floats() : of_rows.floats(), inverse_t.floats()};
  }
  ASSERT_EQ(k.float8_cast(nullptr, job), nullptr);

  const auto value = [&](std::int64_t i, std::int64_t j) {
    const double v = x[i * c.columns + j];
    return c.via_bf16 ? testing_support::nearest(Type::bf16, v) : v;
  };
  std::vector<double> row_amax(static_cast<std::size_t>(c.rows)), column_amax(static_cast<std::size_t>(c.columns));
  double all = 0;
  for (std::int64_t i = 0; i < c.rows; ++i) {
    for (std::int64_t j = 0; j < c.columns; ++j) {
      const double size = std::abs(value(i, j));
      double &row = row_amax[static_cast<std::size_t>(i)], &column = column_amax[static_cast<std::size_t>(j)];
      row = std::max(row, size), column = std::max(column, size), all = std::max(all, size);
    }
  }
  const auto* const plain = static_cast<const unsigned char*>(bytes.data());
  const auto* const transposed = static_cast<const unsigned char*>(turned.data());
  float expected = 0;
  for (std::int64_t i = 0; i < c.rows; ++i) {
    for (std::int64_t j = 0; j < c.columns; ++j) {
      if (c.plain) {
        const double amax = c.by_line ? row_amax[static_cast<std::size_t>(i)] : all;
        ASSERT_EQ(number(format, plain[i * c.columns + j]), cast_value(format, value(i, j), amax, c.by_line, expected));
        ASSERT_EQ(inverse.floats()[c.by_line ? i : 0], expected);
      }
      if (c.transposed) {
        const double amax = c.by_line ? column_amax[static_cast<std::size_t>(j)] : all;
        ASSERT_EQ(number(format, transposed[j * padded + i]),
                  cast_value(format, value(i, j), amax, c.by_line, expected));
        ASSERT_EQ(inverse_t.floats()[c.by_line ? j : 0], expected);
      }
    }
  }
  for (std::int64_t j = 0; c.transposed && j < c.columns; ++j) {
    for (std::int64_t i = c.rows; i < padded; ++i) ASSERT_EQ(transposed[j * padded + i], 0);
  }
}

TEST(GpuFloat8, CastsAsItIsAndTransposed) {
  for (const Format& format : kFormats) {
    for (const Type type : kTypes) {
      for (const auto& [rows, columns] :
           {std::pair<std::int64_t, std::int64_t>{1, 16}, {16, 144}, {77, 272}, {130, 128}}) {
        for (const bool by_line : {false, true}) {
          for (const int wanted : {1, 2, 3}) {
            SCOPED_TRACE(name_of(type) + " [" + std::to_string(rows) + ", " + std::to_string(columns) + "] " +
                         std::to_string(wanted) + (by_line ? " by line" : ""));
            const Case c{type, rows, columns, false, by_line, (wanted & 1) != 0, (wanted & 2) != 0};
            expect_cast(format, c);
            if (type != Type::f32) continue;
            Case rounded = c;
            rounded.via_bf16 = true;
            expect_cast(format, rounded);
          }
        }
      }
    }
  }
}

TEST(GpuFloat8, TheLargestValueMayBeAnyAndIsKept) {
  const GpuKernels& k = host_kernels();
  for (const std::int64_t at : {0, 1, 4095, 70000, 131071}) {
    Array x = Array::random(Type::bf16, 131072, 3), amax(Type::f32, 1);
    x.set(at, -8.0);
    ASSERT_EQ(k.float8_amax(nullptr, 512, 256, Type::bf16, x.data(), false, amax.floats(), nullptr, nullptr), nullptr);
    EXPECT_EQ(amax[0], 8.0);
    x.set(at, 1.0);
    ASSERT_EQ(k.float8_amax(nullptr, 512, 256, Type::bf16, x.data(), false, amax.floats(), nullptr, nullptr), nullptr);
    EXPECT_EQ(amax[0], 8.0);  // as it was
    x.set(at, kNan);
    ASSERT_EQ(k.float8_amax(nullptr, 512, 256, Type::bf16, x.data(), false, amax.floats(), nullptr, nullptr), nullptr);
    EXPECT_TRUE(std::isnan(amax[0]));
  }
}

TEST(GpuFloat8, WhatIsNotFiniteBecomesNan) {
  const GpuKernels& k = host_kernels();
  for (const Format& format : kFormats) {
    for (const double bad : {kNan, std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()}) {
      for (const bool by_line : {false, true}) {
        Array x = Array::random(Type::bf16, 32 * 32, 5), rows(Type::f32, 32), columns(Type::f32, 32);
        Array inverse(Type::f32, 32), inverse_t(Type::f32, 32), bytes(Type::f32, 256), turned(Type::f32, 256);
        x.set(3 * 32 + 9, bad);
        ASSERT_EQ(k.float8_amax(nullptr, 32, 32, Type::bf16, x.data(), false, by_line ? nullptr : rows.floats(),
                                by_line ? rows.floats() : nullptr, by_line ? columns.floats() : nullptr),
                  nullptr);
        float* const of_columns = by_line ? columns.floats() : rows.floats();
        ASSERT_EQ(k.float8_cast(nullptr, {32,
                                          32,
                                          Type::bf16,
                                          x.data(),
                                          false,
                                          format.type,
                                          by_line,
                                          {bytes.data(), rows.floats(), inverse.floats()},
                                          {turned.data(), of_columns, inverse_t.floats()}}),
                  nullptr);
        EXPECT_TRUE(std::isnan(number(format, static_cast<unsigned char*>(bytes.data())[3 * 32 + 9])));
        EXPECT_TRUE(std::isnan(number(format, static_cast<unsigned char*>(turned.data())[9 * 32 + 3])));
      }
    }
  }
}

TEST(GpuFloat8, WrongArgumentsAreRefused) {
  const GpuKernels& k = host_kernels();
  Array x(Type::f32, 64), amax(Type::f32, 64);
  float *const f = x.floats(), *const a = amax.floats();
  EXPECT_NE(k.float8_amax(nullptr, 1, 12, Type::f32, f, false, a, nullptr, nullptr), nullptr);
  EXPECT_NE(k.float8_amax(nullptr, -1, 16, Type::f32, f, false, a, nullptr, nullptr), nullptr);
  EXPECT_NE(k.float8_amax(nullptr, 1, 16, Type::f32, f + 1, false, a, nullptr, nullptr), nullptr);
  EXPECT_NE(k.float8_amax(nullptr, 1, 16, static_cast<Type>(7), f, false, a, nullptr, nullptr), nullptr);
  EXPECT_EQ(k.float8_amax(nullptr, 0, 16, Type::f32, nullptr, false, a, nullptr, nullptr), nullptr);
  Float8CastJob job{1, 16, Type::f32, f, false, Float8Type::e4m3, false, {f, a, a}, {}};
  job.columns = 24;
  EXPECT_NE(k.float8_cast(nullptr, job), nullptr);
  job.columns = 16;
  job.to = static_cast<Float8Type>(7);
  EXPECT_NE(k.float8_cast(nullptr, job), nullptr);
  job.to = Float8Type::e4m3;
  job.plain.values = f + 1;
  EXPECT_NE(k.float8_cast(nullptr, job), nullptr);
  job.rows = 0;
  job.plain.values = f;
  EXPECT_EQ(k.float8_cast(nullptr, job), nullptr);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(x[i] + amax[i], 0.0);
}

}  // namespace
}  // namespace phalanx::kernels::gpu::float8_test
