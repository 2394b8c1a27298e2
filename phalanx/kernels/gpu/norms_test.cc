// RMSNorm, alone and of a sum, and its gradients: the host build against references in double.
#include "phalanx/kernels/gpu/testing/gpu_kernels_test_support.h"

#include <bit>

namespace phalanx::kernels::gpu {
namespace {

using namespace testing_support;

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
                                   Type::f32, weight.data(), nullptr, dx.data(), Type::f32, nullptr, partial.floats(),
                                   1);
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
      Array copy(Type::bf16, count, c.offset);
      for (std::int64_t r = 0; r < c.rows; ++r) inverse.set(r, inverse_of(x, r, c.dim, static_cast<double>(kEps)));
      ASSERT_EQ(host_kernels().rms_norm_backward(
                    nullptr, c.rows, c.dim, c.types.x, x.data(), c.types.weight, weight.data(), inverse.floats(),
                    c.types.y, dy.data(), added ? dh.data() : nullptr, dx.data(), Type::bf16,
                    c.types.x == Type::f32 ? copy.data() : nullptr, partial.floats(), blocks),
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
      for (std::int64_t i = 0; c.types.x == Type::f32 && i < count; ++i) {
        ASSERT_EQ(copy[i], nearest(Type::bf16, dx[i])) << i;
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

TEST(GpuKernels, AddRoundsOnce) {
  for (const auto& [x_type, delta_type] :
       {std::pair(Type::f32, Type::f32), std::pair(Type::f32, Type::bf16), std::pair(Type::f32, Type::f16),
        std::pair(Type::bf16, Type::bf16), std::pair(Type::bf16, Type::f32), std::pair(Type::f16, Type::f16)}) {
    for (const std::int64_t count : {1, 8, 4096, 4099, 5000}) {
      for (const int offset : {0, 1}) {
        Array x = Array::random(x_type, count, 4, offset), delta = Array::random(delta_type, count, 5, offset);
        Array h(x_type, count, offset);
        ASSERT_EQ(host_kernels().add(nullptr, count, x_type, x.data(), delta_type, delta.data(), h.data()), nullptr);
        for (std::int64_t i = 0; i < count; ++i) {
          const double sum = static_cast<double>(static_cast<float>(x[i]) + static_cast<float>(delta[i]));
          ASSERT_EQ(h[i], nearest(x_type, sum))
              << name_of(x_type) << " " << name_of(delta_type) << " " << count << " " << i;
        }
      }
    }
  }
  Array x = Array::random(Type::bf16, 8, 1);
  Array h(Type::bf16, 8);
  EXPECT_NE(host_kernels().add(nullptr, 8, Type::bf16, x.data(), Type::f16, x.data(), h.data()), nullptr);
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

}  // namespace
}  // namespace phalanx::kernels::gpu
