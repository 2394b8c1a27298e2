#include "phalanx/optim/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace phalanx {
namespace {

__extension__ using Wide = __int128;

constexpr double kMax = std::numeric_limits<double>::max();
constexpr double kDenormal = std::numeric_limits<double>::denorm_min();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double exact_sum(const std::vector<double>& values) {
  ExactSum sum;
  for (const double value : values) sum.add(value);
  return sum.value();
}

TEST(ExactSumTest, ClosedForms) {
  EXPECT_EQ(exact_sum({}), 0);
  EXPECT_FALSE(std::signbit(exact_sum({-0.0})));
  EXPECT_EQ(exact_sum({1e300, 1, -1e300}), 1);
  EXPECT_EQ(exact_sum({1, 1e100, 1, -1e100}), 2);
  EXPECT_EQ(exact_sum({0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1}), 1.0);  // in order: 0.9999999999999999
  EXPECT_EQ(exact_sum({kDenormal, kDenormal, kDenormal}), 3 * kDenormal);
  EXPECT_EQ(exact_sum({1, kDenormal, -1}), kDenormal);
  EXPECT_EQ(exact_sum({-1, -kDenormal, 1}), -kDenormal);
  EXPECT_EQ(exact_sum({std::numeric_limits<double>::min(), -kDenormal}),
            std::numeric_limits<double>::min() - kDenormal);
  EXPECT_EQ(exact_sum({kMax, kMax, -kMax}), kMax);  // in order: infinite
  EXPECT_EQ(exact_sum({kMax, kMax}), kInfinity);
  EXPECT_EQ(exact_sum({-kMax, -kMax}), -kInfinity);
  EXPECT_EQ(exact_sum({kMax, -kMax}), 0);
}

TEST(ExactSumTest, RoundsOnceToTheNearestAndTiesToEven) {
  for (int e = -1021; e <= 1023; ++e) {  // wherever the sum lies in the words
    const double one = std::ldexp(1.0, e), step = std::ldexp(1.0, e - 52), half = std::ldexp(1.0, e - 53);
    if (half == 0) continue;
    EXPECT_EQ(exact_sum({one}), one);
    EXPECT_EQ(exact_sum({-one, -step}), -one - step);
    EXPECT_EQ(exact_sum({one, half}), one) << e;                      // a tie: down to even
    EXPECT_EQ(exact_sum({one, step, half}), one + step + step) << e;  // a tie: up to even
    EXPECT_EQ(exact_sum({-one, -half}), -one) << e;
    if (half > kDenormal) {
      EXPECT_EQ(exact_sum({one, half, kDenormal}), one + step) << e;  // just above the tie
      EXPECT_EQ(exact_sum({one, step, half, -kDenormal}), one + step) << e;
    }
  }
  // Half a step above the largest double is infinite, anything less is not.
  const double half = std::ldexp(1.0, 970);
  EXPECT_EQ(exact_sum({kMax, half}), kInfinity);
  EXPECT_EQ(exact_sum({kMax, half, -kDenormal}), kMax);
}

TEST(ExactSumTest, AgreesWithExactIntegers) {
  std::mt19937_64 generator(3);
  for (int round = 0; round < 3000; ++round) {
    const auto count = 1 + generator() % 40;
    const int scale = static_cast<int>(generator() % 1950) - 1074;
    const bool cancelling = generator() % 2 == 0;
    Wide expected = 0;
    ExactSum sum;
    for (std::uint64_t i = 0; i < count; ++i) {
      auto mantissa = static_cast<std::int64_t>(generator() >> 11 >> generator() % 50);
      if (cancelling && generator() % 2 == 0) mantissa = -mantissa;
      const int shift = static_cast<int>(generator() % 60);
      expected += static_cast<Wide>(mantissa) * (Wide{1} << shift);
      sum.add(std::ldexp(static_cast<double>(mantissa), shift + scale));
    }
    ASSERT_EQ(sum.value(), std::ldexp(static_cast<double>(expected), scale)) << "round " << round;
  }
}

/// Doubles of all exponents and both signs.
std::vector<double> any_doubles(std::mt19937_64& generator, std::size_t count) {
  std::vector<double> values(count);
  for (auto& value : values) {
    do value = std::bit_cast<double>(generator());
    while (!std::isfinite(value));
  }
  return values;
}

TEST(ExactSumTest, NeitherOrderNorMergingMatters) {
  std::mt19937_64 generator(4);
  for (int round = 0; round < 200; ++round) {
    auto values = any_doubles(generator, 50);
    for (int i = 0; i < 20; ++i) values.push_back(-values[generator() % 50]);
    ExactSum all;
    for (const double value : values) all.add(value);
    std::shuffle(values.begin(), values.end(), generator);
    ExactSum parts[4];
    ExactSum::Words words{};
    for (const double value : values) parts[generator() % 4].add(value);
    for (const auto& part : parts) {
      const auto addend = part.words();
      for (std::size_t i = 0; i < words.size(); ++i) words[i] += addend[i];
    }
    ExactSum merged = parts[2];
    for (const int i : {3, 0, 1}) merged.merge(parts[i]);
    EXPECT_EQ(all.words(), merged.words());
    EXPECT_EQ(all.words(), ExactSum::from_words(words).words());
    EXPECT_EQ(all.value(), merged.value());
  }
}

TEST(ExactSumTest, ManyAddendsFit) {
  // More additions than between two carries, each filling its three words.
  for (const double value : {std::ldexp(9007199254740991.0, 11), -std::ldexp(9007199254740991.0, 11)}) {
    constexpr std::int64_t kCount = 3 * (1 << 20) + 7;
    ExactSum sum;
    for (std::int64_t i = 0; i < kCount; ++i) sum.add(value);
    const Wide expected = static_cast<Wide>(value) * kCount;
    EXPECT_EQ(sum.value(), static_cast<double>(expected));
  }
  // 2^61 of the largest double, by doubling, and then subtracted again.
  ExactSum large, negative;
  large.add(kMax);
  negative.add(-kMax);
  for (int i = 0; i < 61; ++i) {
    large.merge(large);
    negative.merge(negative);
  }
  EXPECT_EQ(large.value(), kInfinity);
  EXPECT_EQ(negative.value(), -kInfinity);
  large.add(1);
  large.merge(negative);
  EXPECT_EQ(large.value(), 1);
}

TEST(ExactSumTest, SpecialValuesCountAsInIeee754) {
  EXPECT_TRUE(std::isnan(exact_sum({1, std::nan(""), 2})));
  EXPECT_EQ(exact_sum({1, kInfinity, -kMax}), kInfinity);
  EXPECT_EQ(exact_sum({1, -kInfinity, kMax}), -kInfinity);
  EXPECT_TRUE(std::isnan(exact_sum({kInfinity, -kInfinity})));
  EXPECT_TRUE(std::isnan(exact_sum({kInfinity, std::nan("")})));
  for (const double special : {std::nan(""), kInfinity, -kInfinity}) {
    ExactSum sum, other;
    sum.add(5);
    other.add(special);
    sum.merge(ExactSum::from_words(other.words()));
    EXPECT_EQ(std::isnan(sum.value()), std::isnan(special));
    EXPECT_EQ(std::isinf(sum.value()), std::isinf(special));
    EXPECT_EQ(sum.value() < 0, special < 0);
  }
}

}  // namespace
}  // namespace phalanx
