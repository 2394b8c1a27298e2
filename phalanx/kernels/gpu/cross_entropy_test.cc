// Cross entropy and its gradient: the host build against references in double.
#include "phalanx/kernels/gpu/testing/gpu_kernels_test_support.h"

#include <bit>

namespace phalanx::kernels::gpu {
namespace {

using namespace testing_support;

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
        for (const auto& [scale, z_weight] : {std::pair{0.0f, 0.0f}, {0.125f, 0.0f}, {0.0f, 0.01f}, {0.125f, 0.01f}}) {
          const std::int64_t rows = 3, stride = vocab + (offset == 0 ? 0 : 3);
          SCOPED_TRACE(name_of(type) + " vocab " + std::to_string(vocab) + " offset " + std::to_string(offset));
          Array logits = Array::random(type, rows * stride, 22, offset);
          for (std::int64_t i = 0; i < logits.count(); ++i) logits.set(i, 10.0 * logits[i]);
          Array before = logits;
          const std::vector<std::int64_t> labels = {0, vocab / 2, vocab - 1};
          std::vector<float> loss(3);
          ASSERT_EQ(host_kernels().cross_entropy(nullptr, rows, vocab, stride, type, logits.data(), labels.data(),
                                                 scale, z_weight, loss.data()),
                    nullptr);
          for (std::int64_t r = 0; r < rows; ++r) {
            const Softmax want = softmax_of(before, r * stride, vocab);
            const std::int64_t label = labels[static_cast<std::size_t>(r)];
            const double got = static_cast<double>(loss[static_cast<std::size_t>(r)]);
            const double z = static_cast<double>(z_weight) * want.log_sum, of_softmax = 1.0 + 2.0 * z;
            ASSERT_NEAR(got, want.log_sum * (1.0 + z) - before[r * stride + label], 4 * kFloatError * 40.0);
            for (std::int64_t i = 0; i < stride && r * stride + i < logits.count(); ++i) {
              if (scale == 0.0f || i >= vocab) {
                ASSERT_EQ(logits[r * stride + i], before[r * stride + i]) << i;
                continue;
              }
              // exp(x - largest) has an error of the difference's last place: 2^-20, at -20.
              const double p = want.values[static_cast<std::size_t>(i)], s = static_cast<double>(scale);
              ASSERT_TRUE(close(type, logits[r * stride + i], s * (of_softmax * p - (i == label ? 1.0 : 0.0)),
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
      ASSERT_EQ(host_kernels().cross_entropy(nullptr, 4, vocab, vocab, type, logits.data(), labels.data(), scale, 0.01f,
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
  host_kernels().cross_entropy(nullptr, 3, vocab, vocab, Type::f32, logits.data(), labels.data(), 1.0f, 0.0f,
                               loss.data());
  EXPECT_EQ(loss[0], 0.0f);
  for (std::int64_t i = 0; i < vocab; ++i) EXPECT_EQ(logits[i], 0.0);
  EXPECT_TRUE(std::isnan(loss[1]));
  EXPECT_TRUE(std::isnan(loss[2]));
}

}  // namespace
}  // namespace phalanx::kernels::gpu
