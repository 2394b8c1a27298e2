// The kernels in lock step on the host against references in double, written here from the formulas.
//
// Tolerances. One unit in the last place of the type that a value is stored in, since the reference may lie beside the
// middle between two values; and for each of the float operations before it, 2^-22 of the largest of its terms: a few
// units of float. The sums here are short, and add in trees.
#include "phalanx/kernels/gpu/gpu_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "phalanx/kernels/gpu/storage.h"

namespace phalanx::kernels::gpu {
namespace {

constexpr Type kTypes[] = {Type::f32, Type::bf16, Type::f16};
constexpr double kFloatError = 0x1p-22;
const double kNan = std::numeric_limits<double>::quiet_NaN();

int fraction_bits(Type type) { return type == Type::f32 ? 23 : type == Type::bf16 ? 7 : 10; }

/// The distance of the type's values around x.
double ulp(Type type, double x) {
  const int smallest = type == Type::f16 ? -14 : -126;
  return std::ldexp(1.0, std::max(x == 0.0 ? smallest : std::ilogb(x), smallest) - fraction_bits(type));
}

/// The value of the type nearest to x; of two, the even one. For x within its range.
double nearest(Type type, double x) { return std::nearbyint(x / ulp(type, x)) * ulp(type, x); }

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

std::string name_of(Type type) { return type == Type::f32 ? "f32" : type == Type::bf16 ? "bf16" : "f16"; }

/// Whether `got` is `want` but for its rounding to its type and an error of float arithmetic with such terms.
testing::AssertionResult close(Type type, double got, double want, double terms) {
  const double tolerance = ulp(type, want) + kFloatError * terms;
  if (std::abs(got - want) <= tolerance) return testing::AssertionSuccess();
  return testing::AssertionFailure() << got << " in place of " << want << ", with a tolerance of " << tolerance;
}

// ------------------------------------------------------------------------------------------------------- conversions

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

// -------------------------------------------------------------------------------------------------------------- norms

struct NormTypes {
  Type x, weight, y, delta;
};
constexpr NormTypes kNormTypes[] = {
    {Type::f32, Type::f32, Type::f32, Type::f32},   {Type::bf16, Type::bf16, Type::bf16, Type::bf16},
    {Type::f16, Type::f16, Type::f16, Type::f16},   {Type::f32, Type::f32, Type::bf16, Type::bf16},
    {Type::f32, Type::bf16, Type::f16, Type::f16},  {Type::bf16, Type::f32, Type::bf16, Type::f32},
    {Type::bf16, Type::f32, Type::f32, Type::bf16}, {Type::f16, Type::f32, Type::f32, Type::f16},
};
// Rows of odd sizes; within registers in one, two and four packs; and too long for them.
constexpr std::int64_t kDims[] = {1,    7,        8,    64,       100,  128,      256,
                                  1000, 4096 + 3, 4096, 4096 + 8, 8192, 8192 + 8, 16384 + 8};

struct NormCase {
  NormTypes types;
  std::int64_t rows, dim, offset;
  std::string name() const {
    return name_of(types.x) + " " + name_of(types.weight) + " " + name_of(types.y) + " " + name_of(types.delta) + " [" +
           std::to_string(rows) + ", " + std::to_string(dim) + "] + " + std::to_string(offset);
  }
};

template <class F>
void for_norm_cases(F f) {
  for (const NormTypes& types : kNormTypes) {
    for (const std::int64_t dim : kDims) {
      for (const std::int64_t offset : {0, 1}) {
        const NormCase c{types, dim < 1000 ? 5 : 2, dim, offset};
        SCOPED_TRACE(c.name());
        f(c);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

double inverse_of(Array& x, std::int64_t row, std::int64_t dim, double eps) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < dim; ++i) sum += x[row * dim + i] * x[row * dim + i];
  return 1.0 / std::sqrt(sum / static_cast<double>(dim) + eps);
}

constexpr float kEps = 1e-5f;

void expect_norm(const NormCase& c, Array& x, Array& weight, Array& y, Array& inverse_rms) {
  for (std::int64_t i = 0; i < c.rows * c.dim; ++i) {
    const double inverse = inverse_of(x, i / c.dim, c.dim, static_cast<double>(kEps));
    ASSERT_TRUE(close(Type::f32, inverse_rms[i / c.dim], inverse, inverse));
    const double normalized = x[i] * inverse, w = weight[i % c.dim];
    // The inner rounding may go to either side of a middle: by one unit of x's type.
    const double want = nearest(c.types.x, normalized) * w;
    ASSERT_LE(std::abs(y[i] - want),
              ulp(c.types.y, want) + std::abs(w) * ulp(c.types.x, normalized) + kFloatError * std::abs(want))
        << i;
    if (c.dim > 1000) i += 12;
  }
}

TEST(GpuKernels, RmsNormIsItsFormula) {
  for_norm_cases([](const NormCase& c) {
    Array x = Array::random(c.types.x, c.rows * c.dim, 1, c.offset), y(c.types.y, c.rows * c.dim, c.offset);
    Array weight = Array::random(c.types.weight, c.dim, 2, c.offset), inverse(Type::f32, c.rows);
    ASSERT_EQ(host_kernels().rms_norm(nullptr, c.rows, c.dim, c.types.x, x.data(), c.types.weight, weight.data(), kEps,
                                      c.types.y, y.data(), inverse.floats()),
              nullptr);
    expect_norm(c, x, weight, y, inverse);
  });
}

TEST(GpuKernels, TheNormalizedValueIsRoundedBeforeTheWeight) {
  // A weight that no 16-bit type has, and outputs that show it: y, and the gradient of the weight.
  Array x(Type::bf16, 8), weight(Type::f32, 8), y(Type::f32, 8), inverse(Type::f32, 1);
  Array dx(Type::bf16, 8), partial(Type::f32, 8);
  for (int i = 0; i < 8; ++i) x.set(i, i % 2 == 0 ? 1.0 : 3.0), weight.set(i, 1.0 + 0x1p-20);
  host_kernels().rms_norm(nullptr, 1, 8, Type::bf16, x.data(), Type::f32, weight.data(), 0.0f, Type::f32, y.data(),
                          inverse.floats());
  host_kernels().rms_norm_backward(nullptr, 1, 8, Type::bf16, x.data(), Type::f32, weight.data(), inverse.floats(),
                                   Type::f32, weight.data(), nullptr, dx.data(), partial.floats(), 1);
  for (int i = 0; i < 8; ++i) {
    const double rounded = nearest(Type::bf16, (i % 2 == 0 ? 1.0 : 3.0) / std::sqrt(5.0));
    EXPECT_EQ(y[i], nearest(Type::f32, rounded * (1.0 + 0x1p-20)));
    EXPECT_EQ(partial[i], y[i]);
  }
}

TEST(GpuKernels, AddRmsNormIsTheNormOfTheRoundedSum) {
  for_norm_cases([](const NormCase& c) {
    const std::int64_t count = c.rows * c.dim;
    Array x = Array::random(c.types.x, count, 3, c.offset), delta = Array::random(c.types.delta, count, 4, c.offset);
    Array weight = Array::random(c.types.weight, c.dim, 5, c.offset), inverse(Type::f32, c.rows);
    Array h(c.types.x, count, c.offset), y(c.types.y, count, c.offset), y_of_h(c.types.y, count, c.offset);
    ASSERT_EQ(
        host_kernels().add_rms_norm(nullptr, c.rows, c.dim, c.types.x, x.data(), c.types.delta, delta.data(), h.data(),
                                    c.types.weight, weight.data(), kEps, c.types.y, y.data(), inverse.floats()),
        nullptr);
    for (std::int64_t i = 0; i < count; ++i) {
      const double sum = static_cast<double>(static_cast<float>(x[i]) + static_cast<float>(delta[i]));
      ASSERT_EQ(h[i], nearest(c.types.x, sum)) << i;
    }
    host_kernels().rms_norm(nullptr, c.rows, c.dim, c.types.x, h.data(), c.types.weight, weight.data(), kEps, c.types.y,
                            y_of_h.data(), inverse.floats());
    for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(y[i], y_of_h[i]) << i;
    // In place.
    host_kernels().add_rms_norm(nullptr, c.rows, c.dim, c.types.x, x.data(), c.types.delta, delta.data(), x.data(),
                                c.types.weight, weight.data(), kEps, c.types.y, y_of_h.data(), inverse.floats());
    for (std::int64_t i = 0; i < count; ++i) ASSERT_TRUE(x[i] == h[i] && y[i] == y_of_h[i]) << i;
  });
}

/// dx of one row, and what its terms add up to, for tolerances.
struct RowGradients {
  std::vector<double> dx, terms;
};
RowGradients gradients_of_row(const NormCase& c, Array& x, Array& weight, Array& dy, std::int64_t row, double inverse) {
  RowGradients made;
  double dot = 0.0, size = 0.0;
  for (std::int64_t i = 0; i < c.dim; ++i) {
    const double term = dy[row * c.dim + i] * weight[i] * x[row * c.dim + i];
    dot += term;
    size += std::abs(term);
  }
  const double cubed = inverse * inverse * inverse / static_cast<double>(c.dim);
  for (std::int64_t i = 0; i < c.dim; ++i) {
    const double direct = dy[row * c.dim + i] * weight[i] * inverse, xi = x[row * c.dim + i];
    made.dx.push_back(direct - xi * dot * cubed);
    made.terms.push_back(std::abs(direct) + std::abs(xi) * size * cubed);
  }
  return made;
}

TEST(GpuKernels, RmsNormBackwardIsTheGradient) {
  for_norm_cases([](const NormCase& c) {
    for (const bool added : {false, true}) {
      const std::int64_t count = c.rows * c.dim, blocks = c.rows == 5 ? 2 : c.rows + 1;
      Array x = Array::random(c.types.x, count, 6, c.offset), dy = Array::random(c.types.y, count, 7, c.offset);
      Array weight = Array::random(c.types.weight, c.dim, 8, c.offset),
            dh = Array::random(c.types.x, count, 9, c.offset);
      Array inverse(Type::f32, c.rows), dx(c.types.x, count, c.offset), partial(Type::f32, blocks * c.dim, c.offset);
      for (std::int64_t r = 0; r < c.rows; ++r) inverse.set(r, inverse_of(x, r, c.dim, static_cast<double>(kEps)));
      ASSERT_EQ(host_kernels().rms_norm_backward(nullptr, c.rows, c.dim, c.types.x, x.data(), c.types.weight,
                                                 weight.data(), inverse.floats(), c.types.y, dy.data(),
                                                 added ? dh.data() : nullptr, dx.data(), partial.floats(), blocks),
                nullptr);
      for (std::int64_t r = 0; r < c.rows; ++r) {
        const RowGradients want = gradients_of_row(c, x, weight, dy, r, inverse[r]);
        for (std::int64_t i = 0; i < c.dim; ++i) {
          const double more = added ? dh[r * c.dim + i] : 0.0;
          const auto at = static_cast<std::size_t>(i);
          ASSERT_TRUE(close(c.types.x, dx[r * c.dim + i], want.dx[at] + more, 2 * want.terms[at] + std::abs(more)))
              << i;
        }
      }
      for (std::int64_t b = 0; b < blocks; ++b) {
        for (std::int64_t i = 0; i < c.dim; ++i) {
          double want = 0.0, tolerance = 0.0;
          for (std::int64_t r = c.rows * b / blocks; r < c.rows * (b + 1) / blocks; ++r) {
            const double normalized = x[r * c.dim + i] * inverse[r], d = dy[r * c.dim + i];
            want += d * nearest(c.types.x, normalized);
            tolerance += std::abs(d) * ulp(c.types.x, normalized) + kFloatError * std::abs(d * normalized);
          }
          ASSERT_LE(std::abs(partial[b * c.dim + i] - want), tolerance) << "block " << b << " column " << i;
        }
      }
    }
  });
}

TEST(GpuKernels, ColumnSumsAddAllBlocks) {
  for (const Type type : kTypes) {
    for (const std::int64_t blocks : {0, 1, 5, 32, 100, 2049}) {
      for (const std::int64_t dim : {1, 31, 64, 100}) {
        Array partial = Array::random(Type::f32, blocks * dim, 10, 1), out(type, dim, 1);
        ASSERT_EQ(host_kernels().column_sums(nullptr, blocks, dim, partial.floats(), type, out.data()), nullptr);
        for (std::int64_t i = 0; i < dim; ++i) {
          double want = 0.0, terms = 0.0;
          for (std::int64_t b = 0; b < blocks; ++b) {
            want += partial[b * dim + i];
            terms += std::abs(partial[b * dim + i]);
          }
          ASSERT_TRUE(close(type, out[i], want, terms)) << name_of(type) << " " << blocks << " " << dim << " " << i;
        }
      }
    }
  }
}

TEST(GpuKernels, BackwardBlocksAreAtLeastOneAndLeaveRowsForEach) {
  EXPECT_EQ(rms_norm_backward_blocks(0, 2048), 1);
  EXPECT_EQ(rms_norm_backward_blocks(1, 64), 1);
  EXPECT_EQ(rms_norm_backward_blocks(9, 8192), 3);
  EXPECT_EQ(rms_norm_backward_blocks(1 << 20, 8192), 528);
  EXPECT_EQ(rms_norm_backward_blocks(1 << 20, 1025), 528);
  EXPECT_EQ(rms_norm_backward_blocks(1 << 20, 1024), 1056);
  EXPECT_EQ(rms_norm_backward_blocks(1 << 20, 64), 16896);
  EXPECT_EQ(rms_norm_backward_blocks(1 << 20, 1), 16896);
}

// ------------------------------------------------------------------------------------------------------------- rotary

TEST(GpuKernels, RotateTurnsPairsOfBothTensors) {
  constexpr std::int64_t kBatch = 2, kSeq = 5;
  for (const Type type : kTypes) {
    for (const std::int64_t half : {1, 7, 8, 32}) {
      for (const std::int64_t offset : {0, 1}) {
        for (const bool per_row : {false, true}) {
          for (const float sign : {1.0f, -1.0f}) {
            const std::int64_t head = 2 * half, heads[2] = {6, 2};
            // Queries: heads outside of positions, as the transposed gradients of attention are. Keys: a part of a wider
            // product.
            Array q = Array::random(type, kBatch * 6 * kSeq * head, 11, offset);
            Array k = Array::random(type, kBatch * kSeq * 4 * head, 12, offset);
            Array q_out(type, q.count(), offset), k_out(type, kBatch * kSeq * 2 * head, offset);
            Array* const in[2] = {&q, &k};
            Array* const out[2] = {&q_out, &k_out};
            const RotateJob jobs[2] = {{q.data(), 6 * kSeq * head, head, kSeq * head, heads[0], q_out.data()},
                                       {k.data(), kSeq * 4 * head, 4 * head, head, heads[1], k_out.data()}};
            Array cos = Array::random(Type::f32, kBatch * kSeq * half, 13, offset);
            Array sin = Array::random(Type::f32, kBatch * kSeq * half, 14, offset);
            ASSERT_EQ(host_kernels().rotate(nullptr, kBatch, kSeq, head, type,
                                            {cos.floats(), sin.floats(), per_row, sign}, jobs, 2),
                      nullptr);
            for (int j = 0; j < 2; ++j) {
              for (std::int64_t i = 0; i < kBatch * kSeq * heads[j] * head; ++i) {
                const std::int64_t e = i % head, h = i / head % heads[j], p = i / head / heads[j];
                const std::int64_t from =
                    p / kSeq * jobs[j].batch_stride + p % kSeq * jobs[j].position_stride + h * jobs[j].head_stride;
                const std::int64_t angle = (per_row ? p : p % kSeq) * half + e % half;
                const double c = cos[angle], s = sin[angle] * static_cast<double>(sign);
                const double own = (*in[j])[from + e] * c;
                const double other = (*in[j])[from + (e + half) % head] * (e < half ? -s : s);
                ASSERT_TRUE(close(type, (*out[j])[i], own + other, std::abs(own) + std::abs(other)))
                    << name_of(type) << " half " << half << " offset " << offset << " tensor " << j << " element " << i;
              }
            }
          }
        }
      }
    }
  }
}

TEST(GpuKernels, RotateTakesOneTensor) {
  Array x = Array::random(Type::f32, 3 * 4, 15), y(Type::f32, 3 * 4);
  Array cos(Type::f32, 3 * 2), sin(Type::f32, 3 * 2);
  for (int i = 0; i < 6; ++i) sin.set(i, 1.0);  // by a right angle
  const RotateJob job{x.data(), 12, 4, 4, 1, y.data()};
  ASSERT_EQ(host_kernels().rotate(nullptr, 1, 3, 4, Type::f32, {cos.floats(), sin.floats(), false, 1.0f}, &job, 1),
            nullptr);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(y[i], i % 4 < 2 ? -x[i + 2] : x[i - 2]);
}

// ------------------------------------------------------------------------------------------------------------- swiglu

struct SwigluCase {
  Type type;
  std::int64_t rows, hidden, stride, offset;
};
template <class F>
void for_swiglu_cases(F f) {
  for (const Type type : kTypes) {
    for (const std::int64_t rows : {1, 3}) {
      for (const std::int64_t hidden : {1, 7, 64, 100, 4096 + 8, 8192 + 3}) {
        for (const std::int64_t stride : {hidden, 2 * hidden, 2 * hidden + 5}) {
          for (const std::int64_t offset : {0, 1}) {
            SCOPED_TRACE(name_of(type) + " [" + std::to_string(rows) + ", " + std::to_string(hidden) + "] stride " +
                         std::to_string(stride) + " offset " + std::to_string(offset));
            f(SwigluCase{type, rows, hidden, stride, offset});
            if (testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
}

// e^100 is infinite in float, and its reciprocal 0.
constexpr double kUnderflow = 0x1p-100;

/// Gates from -6 to 6, and a few far outside.
Array gates_and_ups(const SwigluCase& c, int seed) {
  Array made = Array::random(c.type, c.rows * c.stride + c.hidden, seed, c.offset);
  for (std::int64_t i = 0; i < made.count(); ++i) made.set(i, 6.0 * made[i]);
  if (c.hidden > 4) made.set(0, -100.0), made.set(1, 100.0), made.set(2, 0.0), made.set(3, -30.0);
  return made;
}

TEST(GpuKernels, SwigluIsItsFormula) {
  for_swiglu_cases([](const SwigluCase& c) {
    // Up begins where gate's rows end, as the second half of a product.
    Array both = gates_and_ups(c, 16), y(c.type, c.rows * c.hidden, c.offset);
    ASSERT_EQ(host_kernels().swiglu(nullptr, c.rows, c.hidden, c.type, both.data(), c.stride, both.at(c.hidden),
                                    c.stride, y.data()),
              nullptr);
    for (std::int64_t i = 0; i < c.rows * c.hidden; ++i) {
      const std::int64_t at = i / c.hidden * c.stride + i % c.hidden;
      const double want = both[at] / (1.0 + std::exp(-both[at])) * both[at + c.hidden];
      ASSERT_TRUE(close(c.type, y[i], want, std::abs(want) + kUnderflow)) << i << " gate " << both[at];
    }
  });
}

TEST(GpuKernels, SwigluBackwardIsTheGradient) {
  for_swiglu_cases([](const SwigluCase& c) {
    for (const bool product : {false, true}) {
      Array both = gates_and_ups(c, 17), dy = Array::random(c.type, c.rows * c.hidden, 18, c.offset);
      Array grads(c.type, both.count(), c.offset), y(c.type, c.rows * c.hidden, c.offset);
      ASSERT_EQ(host_kernels().swiglu_backward(nullptr, c.rows, c.hidden, c.type, both.data(), c.stride,
                                               both.at(c.hidden), c.stride, dy.data(), grads.data(), c.stride,
                                               grads.at(c.hidden), c.stride, product ? y.data() : nullptr),
                nullptr);
      if (c.stride < 2 * c.hidden && c.rows > 1) continue;  // rows of gates and ups overlap
      for (std::int64_t i = 0; i < c.rows * c.hidden; ++i) {
        const std::int64_t at = i / c.hidden * c.stride + i % c.hidden;
        const double g = both[at], u = both[at + c.hidden], d = dy[i], sigmoid = 1.0 / (1.0 + std::exp(-g));
        const double dgate = d * u * (sigmoid + g * sigmoid * (1.0 - sigmoid));
        // 1 - sigmoid loses what sigmoid was rounded by, whatever is left of it.
        ASSERT_TRUE(close(c.type, grads[at], dgate, std::abs(d * u) * (sigmoid + std::abs(g * sigmoid)) + kUnderflow))
            << i;
        ASSERT_TRUE(close(c.type, grads[at + c.hidden], d * g * sigmoid, std::abs(d * g * sigmoid) + kUnderflow)) << i;
        if (product) {
          ASSERT_TRUE(close(c.type, y[i], g * sigmoid * u, std::abs(g * sigmoid * u) + kUnderflow)) << i;
        }
      }
    }
  });
}

TEST(GpuKernels, SwigluTakesAStrideForEachTensor) {
  const std::int64_t rows = 3, hidden = 24, gate_stride = 24, up_stride = 32, dgate_stride = 40, dup_stride = 48;
  Array gate = Array::random(Type::f32, rows * gate_stride, 30), up = Array::random(Type::f32, rows * up_stride, 31);
  Array dy = Array::random(Type::f32, rows * hidden, 32), dgate(Type::f32, rows * dgate_stride);
  Array dup(Type::f32, rows * dup_stride), y(Type::f32, rows * hidden), again(Type::f32, rows * hidden);
  const GpuKernels& k = host_kernels();
  k.swiglu(nullptr, rows, hidden, Type::f32, gate.data(), gate_stride, up.data(), up_stride, again.data());
  k.swiglu_backward(nullptr, rows, hidden, Type::f32, gate.data(), gate_stride, up.data(), up_stride, dy.data(),
                    dgate.data(), dgate_stride, dup.data(), dup_stride, y.data());
  for (std::int64_t r = 0; r < rows; ++r) {
    Array dgate_row(Type::f32, hidden), dup_row(Type::f32, hidden), y_row(Type::f32, hidden);
    k.swiglu_backward(nullptr, 1, hidden, Type::f32, gate.at(r * gate_stride), hidden, up.at(r * up_stride), hidden,
                      dy.at(r * hidden), dgate_row.data(), hidden, dup_row.data(), hidden, y_row.data());
    for (std::int64_t i = 0; i < hidden; ++i) {
      ASSERT_EQ(dgate[r * dgate_stride + i], dgate_row[i]);
      ASSERT_EQ(dup[r * dup_stride + i], dup_row[i]);
      ASSERT_EQ(y[r * hidden + i], y_row[i]);
      ASSERT_NEAR(again[r * hidden + i], y_row[i], kFloatError * std::abs(y_row[i]));
    }
    for (std::int64_t i = hidden; i < dgate_stride; ++i) ASSERT_EQ(dgate[r * dgate_stride + i], 0.0);
    for (std::int64_t i = hidden; i < dup_stride; ++i) ASSERT_EQ(dup[r * dup_stride + i], 0.0);
  }
}

TEST(GpuKernels, SwigluBackwardWorksInPlace) {
  for (const Type type : kTypes) {
    Array gate = Array::random(type, 3 * 64, 19), up = Array::random(type, 3 * 64, 20);
    Array dy = Array::random(type, 3 * 64, 21), dgate(type, 3 * 64), dup(type, 3 * 64), y(type, 3 * 64);
    const GpuKernels& k = host_kernels();
    k.swiglu_backward(nullptr, 3, 64, type, gate.data(), 64, up.data(), 64, dy.data(), dgate.data(), 64, dup.data(), 64,
                      y.data());
    k.swiglu_backward(nullptr, 3, 64, type, gate.data(), 64, up.data(), 64, dy.data(), gate.data(), 64, up.data(), 64,
                      dy.data());
    for (std::int64_t i = 0; i < 3 * 64; ++i) {
      EXPECT_TRUE(gate[i] == dgate[i] && up[i] == dup[i] && dy[i] == y[i]) << i;
    }
  }
}

// ------------------------------------------------------------------------------------------------------ cross entropy

struct Softmax {
  std::vector<double> values;
  double log_sum;
};
Softmax softmax_of(Array& logits, std::int64_t from, std::int64_t vocab) {
  Softmax made{{}, 0.0};
  double largest = -std::numeric_limits<double>::infinity(), sum = 0.0;
  for (std::int64_t i = 0; i < vocab; ++i) largest = std::max(largest, logits[from + i]);
  for (std::int64_t i = 0; i < vocab; ++i) sum += std::exp(logits[from + i] - largest);
  for (std::int64_t i = 0; i < vocab; ++i) made.values.push_back(std::exp(logits[from + i] - largest) / sum);
  made.log_sum = largest + std::log(sum);
  return made;
}

TEST(GpuKernels, CrossEntropyIsTheLossAndItsGradient) {
  for (const Type type : kTypes) {
    for (const std::int64_t vocab : {1, 5, 7, 64, 100, 1001, 32000, 50257}) {
      for (const std::int64_t offset : {0, 1}) {
        for (const float scale : {0.0f, 0.125f}) {
          const std::int64_t rows = 3, stride = vocab + (offset == 0 ? 0 : 3);
          SCOPED_TRACE(name_of(type) + " vocab " + std::to_string(vocab) + " offset " + std::to_string(offset));
          Array logits = Array::random(type, rows * stride, 22, offset);
          for (std::int64_t i = 0; i < logits.count(); ++i) logits.set(i, 10.0 * logits[i]);
          Array before = logits;
          const std::vector<std::int64_t> labels = {0, vocab / 2, vocab - 1};
          std::vector<float> loss(3);
          ASSERT_EQ(host_kernels().cross_entropy(nullptr, rows, vocab, stride, type, logits.data(), labels.data(),
                                                 scale, loss.data()),
                    nullptr);
          for (std::int64_t r = 0; r < rows; ++r) {
            const Softmax want = softmax_of(before, r * stride, vocab);
            const std::int64_t label = labels[static_cast<std::size_t>(r)];
            const double got = static_cast<double>(loss[static_cast<std::size_t>(r)]);
            ASSERT_NEAR(got, want.log_sum - before[r * stride + label], 4 * kFloatError * 20.0);
            for (std::int64_t i = 0; i < stride && r * stride + i < logits.count(); ++i) {
              if (scale == 0.0f || i >= vocab) {
                ASSERT_EQ(logits[r * stride + i], before[r * stride + i]) << i;
                continue;
              }
              // exp(x - largest) has an error of the difference's last place: 2^-20, at -20.
              const double p = want.values[static_cast<std::size_t>(i)], s = static_cast<double>(scale);
              ASSERT_TRUE(close(type, logits[r * stride + i], s * (p - (i == label ? 1.0 : 0.0)),
                                s * (8 * p + (i == label ? 1.0 : 0.0))))
                  << i;
            }
          }
        }
      }
    }
  }
}

TEST(GpuKernels, CrossEntropyOfRowsWithoutALabel) {
  const std::int64_t vocab = 37;
  for (const Type type : kTypes) {
    for (const float scale : {0.0f, 1.0f}) {
      Array logits = Array::random(type, 4 * vocab, 23), before = logits;
      const std::vector<std::int64_t> labels = {kIgnoredLabel, vocab, -1, std::int64_t{1} << 40};
      std::vector<float> loss(4, 5.0f);
      ASSERT_EQ(host_kernels().cross_entropy(nullptr, 4, vocab, vocab, type, logits.data(), labels.data(), scale,
                                             loss.data()),
                nullptr);
      EXPECT_EQ(loss[0], 0.0f);
      for (std::size_t r = 1; r < 4; ++r) EXPECT_TRUE(std::isnan(loss[r])) << r;
      for (std::int64_t i = 0; i < 4 * vocab; ++i) {
        if (scale != 0.0f && i >= vocab)
          EXPECT_TRUE(std::isnan(logits[i])) << i;
        else
          EXPECT_EQ(logits[i], scale == 0.0f ? before[i] : 0.0) << i;
      }
    }
  }
}

TEST(GpuKernels, CrossEntropyOfLogitsThatAreNotFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  const std::int64_t vocab = 4096, label = 3;
  Array logits(Type::f32, 3 * vocab);
  for (std::int64_t i = 0; i < 3 * vocab; ++i) logits.set(i, i < vocab ? -infinity : 0.0);
  logits.set(label, 2.0);  // all others of the row excluded: whole lanes see nothing else
  logits.set(vocab + 9, kNan);
  logits.set(2 * vocab + 9, infinity);
  const std::vector<std::int64_t> labels(3, label);
  std::vector<float> loss(3);
  host_kernels().cross_entropy(nullptr, 3, vocab, vocab, Type::f32, logits.data(), labels.data(), 1.0f, loss.data());
  EXPECT_EQ(loss[0], 0.0f);
  for (std::int64_t i = 0; i < vocab; ++i) EXPECT_EQ(logits[i], 0.0);
  EXPECT_TRUE(std::isnan(loss[1]));
  EXPECT_TRUE(std::isnan(loss[2]));
}

// --------------------------------------------------------------------------------------------------- lists of tensors

/// The state of one parameter, and a reference in float, operation by operation.
struct Parameter {
  Array grad, parameter, exp_avg, exp_avg_sq, copy;
  float step;

  Parameter(std::int64_t count, Type grad_type, Type copy_type, std::int64_t offset, float step)
      : grad(Array::random(grad_type, count, 24, offset)),
        parameter(Array::random(Type::f32, count, 25, offset)),
        exp_avg(Array::random(Type::f32, count, 26, offset)),
        exp_avg_sq(Array::random(Type::f32, count, 27, offset)),
        copy(copy_type, count, offset),
        step(step) {
    for (std::int64_t i = 0; i < count; ++i) exp_avg_sq.set(i, std::abs(exp_avg_sq[i]));
  }
  AdamWTensor tensor(bool copied) {
    return {grad.count(),
            parameter.floats(),
            grad.data(),
            exp_avg.floats(),
            exp_avg_sq.floats(),
            copied ? copy.data() : nullptr,
            &step};
  }
  void reference(const AdamWSettings& s, float factor) {
    const float decay = static_cast<float>(s.lr * s.weight_decay), b1 = static_cast<float>(1 - s.beta1);
    const float beta2 = static_cast<float>(s.beta2), b2 = static_cast<float>(1 - s.beta2),
                eps = static_cast<float>(s.eps);
    const double t = static_cast<double>(step);
    const float size = static_cast<float>(s.lr / (1 - std::pow(s.beta1, t)));
    const float correction = static_cast<float>(1 / std::sqrt(1 - std::pow(s.beta2, t)));
    for (std::int64_t i = 0; i < grad.count(); ++i) {
      const float g = static_cast<float>(grad[i]) * factor, p0 = parameter.floats()[i];
      const float p = p0 - decay * p0;
      const float m = exp_avg.floats()[i] + b1 * (g - exp_avg.floats()[i]);
      const float v = beta2 * exp_avg_sq.floats()[i] + b2 * g * g;
      exp_avg.floats()[i] = m;
      exp_avg_sq.floats()[i] = v;
      parameter.floats()[i] = p - size * m / (std::sqrt(v) * correction + eps);
    }
  }
};

void expect_same(Array& got, Array& want) {
  for (std::int64_t i = 0; i < got.count(); ++i) ASSERT_EQ(got[i], want[i]) << i;
}

TEST(GpuKernels, AdamWIsTheFormulaToTheBit) {
  const float scale = 0.37f;
  for (const Type grad_type : kTypes) {
    for (const Type copy_type : kTypes) {
      for (const bool scaled : {false, true}) {
        const AdamWSettings settings{1e-2,   0.9, 0.95, 1e-8, 0.1, grad_type, copy_type, scaled ? &scale : nullptr,
                                     nullptr};
        // More tensors than a launch takes, of no, one and several chunks, some of them not aligned, at other steps.
        std::vector<Parameter> parameters, references;
        std::vector<AdamWTensor> tensors;
        for (int t = 0; t < 60; ++t) {
          const std::int64_t count = t == 7 ? 0 : t == 8 ? 16384 : t == 50 ? 40001 : 1 + 13 * t;
          parameters.emplace_back(count, grad_type, copy_type, t % 3 == 0 ? 1 : 0, static_cast<float>(1 + 11 * t));
        }
        references = parameters;
        for (std::size_t t = 0; t < parameters.size(); ++t) tensors.push_back(parameters[t].tensor(t % 2 == 0));
        ASSERT_EQ(host_kernels().adamw(nullptr, static_cast<int>(tensors.size()), tensors.data(), settings), nullptr);
        for (std::size_t t = 0; t < parameters.size(); ++t) {
          SCOPED_TRACE(name_of(grad_type) + " tensor " + std::to_string(t));
          references[t].reference(settings, scaled ? scale : 1.0f);
          expect_same(parameters[t].parameter, references[t].parameter);
          expect_same(parameters[t].exp_avg, references[t].exp_avg);
          expect_same(parameters[t].exp_avg_sq, references[t].exp_avg_sq);
          for (std::int64_t i = 0; i < parameters[t].copy.count(); ++i) {
            const double p = parameters[t].parameter[i];
            ASSERT_EQ(parameters[t].copy[i], t % 2 == 0 ? nearest(copy_type, p) : 0.0);
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(GpuKernels, ASkippedStepChangesNothing) {
  Parameter parameter(100, Type::f32, Type::bf16, 0, 3.0f);
  Parameter before = parameter;
  float skip = 1.0f, counter = 3.0f;
  AdamWSettings settings{1e-2, 0.9, 0.95, 1e-8, 0.1, Type::f32, Type::bf16, nullptr, &skip};
  const AdamWTensor tensor = parameter.tensor(true);
  float* const counters[] = {&counter};
  EXPECT_EQ(host_kernels().adamw(nullptr, 1, &tensor, settings), nullptr);
  EXPECT_EQ(host_kernels().increment(nullptr, 1, counters, &skip), nullptr);
  EXPECT_EQ(counter, 3.0f);
  expect_same(parameter.parameter, before.parameter);
  expect_same(parameter.exp_avg, before.exp_avg);
  expect_same(parameter.exp_avg_sq, before.exp_avg_sq);
  expect_same(parameter.copy, before.copy);
  skip = 0.0f;
  EXPECT_EQ(host_kernels().adamw(nullptr, 1, &tensor, settings), nullptr);
  EXPECT_NE(parameter.parameter[0], before.parameter[0]);
}

TEST(GpuKernels, IncrementAddsOneToEachCounter) {
  std::vector<float> counters(600);
  std::vector<float*> pointers;
  for (std::size_t i = 0; i < counters.size(); ++i) {
    counters[i] = static_cast<float>(i);
    pointers.push_back(&counters[i]);
  }
  const float skip = 0.0f;
  EXPECT_EQ(host_kernels().increment(nullptr, 600, pointers.data(), nullptr), nullptr);
  EXPECT_EQ(host_kernels().increment(nullptr, 599, pointers.data(), &skip), nullptr);
  for (std::size_t i = 0; i < 600; ++i) EXPECT_EQ(counters[i], static_cast<float>(i + (i < 599 ? 2 : 1)));
}

TEST(GpuKernels, SquaresAddUpInDouble) {
  for (const Type type : kTypes) {
    std::vector<Array> arrays;
    std::vector<ConstTensor> tensors;
    for (int t = 0; t < 140; ++t) {  // more than a launch takes
      const std::int64_t count = t == 3 ? 0 : t == 4 ? 65536 : t == 130 ? 2 * 65536 + 77 : 1 + 5 * t;
      arrays.push_back(Array::random(type, count, 28 + t, t % 2));
    }
    long double want = 0.0L;
    for (Array& array : arrays) {
      tensors.push_back({array.count(), array.data()});
      for (std::int64_t i = 0; i < array.count(); ++i) want += static_cast<long double>(array[i]) * array[i];
    }
    const std::int64_t blocks = squares_blocks(140, tensors.data());
    ASSERT_EQ(blocks, 137 + 1 + 3 + 1 - 1);
    std::vector<double> partial(static_cast<std::size_t>(blocks), kNan);
    double total = kNan;
    ASSERT_EQ(host_kernels().squares(nullptr, 140, tensors.data(), type, partial.data()), nullptr);
    ASSERT_EQ(host_kernels().total(nullptr, blocks, partial.data(), &total), nullptr);
    // Squares of floats are exact in double, and the trees are some thirty additions deep.
    EXPECT_NEAR(total, static_cast<double>(want), 32 * 0x1p-53 * static_cast<double>(want));
  }
}

TEST(GpuKernels, TotalOfManyPartialSums) {
  for (const std::int64_t count : {0, 1, 33, 1024, 5000}) {
    std::vector<double> partial;
    for (std::int64_t i = 0; i < count; ++i) partial.push_back(static_cast<double>(i));
    double total = kNan;
    ASSERT_EQ(host_kernels().total(nullptr, count, partial.data(), &total), nullptr);
    EXPECT_EQ(total, 0.5 * static_cast<double>(count * (count - 1)));
  }
}

// ------------------------------------------------------------------------------------------------- errors and nothing

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
  EXPECT_NE(k.rms_norm_backward(nullptr, 1, 4, Type::f32, f, Type::f32, f, f, Type::f32, f, nullptr, f, f, 0), nullptr);
  EXPECT_NE(k.rms_norm_backward(nullptr, 1, 4, Type::f16, f, Type::f32, f, f, Type::bf16, f, nullptr, f, f, 1),
            nullptr);
  EXPECT_NE(k.column_sums(nullptr, -1, 4, f, Type::f32, f), nullptr);
  EXPECT_NE(k.column_sums(nullptr, 1, 4, f, unknown, f), nullptr);
  EXPECT_NE(k.rotate(nullptr, 1, 1, 3, Type::f32, angles, &job, 1), nullptr);
  EXPECT_NE(k.rotate(nullptr, 1, 1, 4, Type::f32, angles, &job, 3), nullptr);
  EXPECT_NE(k.rotate(nullptr, 1 << 16, 1 << 16, 4, Type::f32, angles, &job, 1), nullptr);
  EXPECT_NE(k.swiglu(nullptr, -1, 4, Type::f32, f, 4, f, 4, f), nullptr);
  EXPECT_NE(k.swiglu_backward(nullptr, 1, 4, unknown, f, 4, f, 4, f, f, 4, f, 4, f), nullptr);
  EXPECT_NE(k.cross_entropy(nullptr, 1, 8, 7, Type::f32, f, &label, 1.0f, f), nullptr);
  EXPECT_NE(k.cross_entropy(nullptr, 1, 0, 8, Type::f32, f, &label, 1.0f, f), nullptr);
  EXPECT_NE(k.adamw(nullptr, 1, &tensor, {1, 0, 0, 0, 0, unknown, Type::f32, nullptr, nullptr}), nullptr);
  EXPECT_NE(k.adamw(nullptr, 1, &tensor, {1, 0, 0, 0, 0, Type::f32, unknown, nullptr, nullptr}), nullptr);
  EXPECT_NE(k.squares(nullptr, 1, &negative, Type::f32, nullptr), nullptr);
  EXPECT_NE(k.total(nullptr, -1, nullptr, nullptr), nullptr);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(a[i], 0.0);
}

TEST(GpuKernels, NothingToDoIsNoError) {
  const GpuKernels& k = host_kernels();
  const RotateJob job{nullptr, 0, 0, 0, 1, nullptr};
  EXPECT_EQ(k.rms_norm(nullptr, 0, 4, Type::f32, nullptr, Type::f32, nullptr, kEps, Type::f32, nullptr, nullptr),
            nullptr);
  EXPECT_EQ(k.rotate(nullptr, 0, 4, 4, Type::f32, {nullptr, nullptr, false, 1.0f}, &job, 1), nullptr);
  EXPECT_EQ(k.swiglu(nullptr, 4, 0, Type::f32, nullptr, 0, nullptr, 0, nullptr), nullptr);
  EXPECT_EQ(k.cross_entropy(nullptr, 0, 4, 4, Type::f32, nullptr, nullptr, 1.0f, nullptr), nullptr);
  EXPECT_EQ(k.adamw(nullptr, 0, nullptr, {1, 0, 0, 0, 0, Type::f32, Type::f32, nullptr, nullptr}), nullptr);
  EXPECT_EQ(k.increment(nullptr, 0, nullptr, nullptr), nullptr);
  EXPECT_EQ(k.squares(nullptr, 0, nullptr, Type::f32, nullptr), nullptr);
  // Without rows the weight's gradient is 0.
  Array partial = Array::random(Type::f32, 3 * 8, 1);
  EXPECT_EQ(k.rms_norm_backward(nullptr, 0, 8, Type::f32, nullptr, Type::f32, partial.floats(), nullptr, Type::f32,
                                nullptr, nullptr, nullptr, partial.floats(), 3),
            nullptr);
  for (int i = 0; i < 3 * 8; ++i) EXPECT_EQ(partial[i], 0.0);
}

}  // namespace
}  // namespace phalanx::kernels::gpu
