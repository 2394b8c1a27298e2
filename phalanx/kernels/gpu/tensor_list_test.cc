// AdamW, its counters, and sums of squares, over lists of tensors: the host build against references.
#include "phalanx/kernels/gpu/testing/gpu_kernels_test_support.h"

#include <bit>

namespace phalanx::kernels::gpu {
namespace {

using namespace testing_support;

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

}  // namespace
}  // namespace phalanx::kernels::gpu
