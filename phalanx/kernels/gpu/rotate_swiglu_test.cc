// Rotary embedding and SwiGLU: the host build against references in double.
#include "phalanx/kernels/gpu/testing/gpu_kernels_test_support.h"

#include <bit>

namespace phalanx::kernels::gpu {
namespace {

using namespace testing_support;

TEST(GpuKernels, RotateTurnsPairsOfBothTensors) {
  constexpr std::int64_t kBatch = 2, kSeq = 5;
  for (const Type type : kTypes) {
    for (const std::int64_t half : {1, 7, 8, 32}) {
      for (const std::int64_t offset : {0, 1}) {
        for (const bool per_row : {false, true}) {
          for (const float sign : {1.0f, -1.0f}) {
            const std::int64_t head = 2 * half, heads[2] = {6, 2};
            // Queries: heads outside of positions, as the transposed gradients of attention are.
            // Keys: a part of a wider product.
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

}  // namespace
}  // namespace phalanx::kernels::gpu
