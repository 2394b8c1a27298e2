// The reduction kernels: every instruction set that this machine has gives the same bits as plain loops.
#include "phalanx/comm/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace phalanx {
namespace {

std::vector<ReduceKernel> kernels_for(DataType dtype, ReduceOp op) {
  return {reduce_kernel(dtype, op), reduce_baseline::kernel(dtype, op)};
}

template <class T>
void expect_reduced(DataType dtype, ReduceOp op, const std::vector<std::vector<T>>& inputs,
                    const std::vector<T>& expected) {
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data());
  for (const ReduceKernel kernel : kernels_for(dtype, op)) {
    std::vector<T> out(expected.size());
    kernel(out.data(), pointers.data(), static_cast<int>(inputs.size()), out.size());
    EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size() * sizeof(T)), 0) << name_of(dtype) << name_of(op);
    // In place of any input.
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      std::vector<T> own = inputs[k];
      std::vector<const void*> aliased = pointers;
      aliased[k] = own.data();
      kernel(own.data(), aliased.data(), static_cast<int>(inputs.size()), own.size());
      EXPECT_EQ(std::memcmp(own.data(), expected.data(), own.size() * sizeof(T)), 0) << "in place of input " << k;
    }
  }
}

TEST(Reduce, Float32SumsInRankOrder) {
  for (int n : {1, 2, 3, 4, 5, 8}) {
    std::vector<std::vector<float>> inputs(static_cast<std::size_t>(n), std::vector<float>(2051));
    std::vector<float> sums(2051);
    std::vector<float> means(2051);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      for (std::size_t k = 0; k < inputs.size(); ++k)
        inputs[k][i] = std::sin(static_cast<float>(i * 31 + k * 7)) * std::exp(static_cast<float>(k));
      sums[i] = inputs[0][i];
      for (std::size_t k = 1; k < inputs.size(); ++k) sums[i] += inputs[k][i];
      means[i] = sums[i] / static_cast<float>(n);
    }
    expect_reduced(DataType::f32, ReduceOp::sum, inputs, sums);
    expect_reduced(DataType::f32, ReduceOp::avg, inputs, means);
  }
}

// Every float16 pattern goes to float32 and back unchanged, and halves round to even, as the hardware does it.
TEST(Reduce, Float16ConvertsExactly) {
  std::vector<std::uint16_t> all;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits)
    if ((bits & 0x7c00) != 0x7c00 || (bits & 0x3ff) == 0) all.push_back(static_cast<std::uint16_t>(bits));
  expect_reduced<std::uint16_t>(DataType::f16, ReduceOp::max, {all}, all);
  // 1 + 2^-11 lies half-way between 1 and its successor; 2048 + 1 between 2048 and 2050, 2050 + 1 likewise.
  const std::uint16_t one = 0x3c00;
  const std::uint16_t tiny = 0x1000;
  const std::uint16_t big = 0x6800;
  expect_reduced<std::uint16_t>(DataType::f16, ReduceOp::sum, {{one, big, 0x6801}, {tiny, one, one}},
                                {one, big, 0x6802});
}

TEST(Reduce, Bfloat16RoundsOnceAfterAccumulatingInFloat32) {
  // 256 + 1 + 1 in bfloat16 (8 bits): 258 if rounded once, 256 if after each addition.
  const auto bf = [](float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); };
  expect_reduced<std::uint16_t>(DataType::bf16, ReduceOp::sum, {{bf(256)}, {bf(1)}, {bf(1)}}, {bf(258)});
  const std::uint16_t nan = 0x7fc0;
  expect_reduced<std::uint16_t>(DataType::bf16, ReduceOp::min, {{bf(1), nan}, {nan, bf(2)}}, {nan, nan});
}

TEST(Reduce, MinAndMaxPassNanOn) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    for (const ReduceKernel kernel : kernels_for(DataType::f32, op)) {
      const std::vector<float> a{nan, 1, 2};
      const std::vector<float> b{1, nan, 3};
      const void* inputs[] = {a.data(), b.data()};
      std::vector<float> out(3);
      kernel(out.data(), inputs, 2, 3);
      EXPECT_TRUE(std::isnan(out[0]));
      EXPECT_TRUE(std::isnan(out[1]));
      EXPECT_EQ(out[2], op == ReduceOp::min ? 2 : 3);
    }
  }
}

TEST(Reduce, IntegersKeepTheirSignAndWrap) {
  using limits = std::numeric_limits<std::int64_t>;
  expect_reduced<std::int64_t>(DataType::i64, ReduceOp::min, {{-5, 3}, {4, -9}}, {-5, -9});
  expect_reduced<std::int64_t>(DataType::i64, ReduceOp::sum, {{limits::max()}, {1}}, {limits::min()});
  expect_reduced<std::uint8_t>(DataType::u8, ReduceOp::max, {{200}, {100}}, {200});
  EXPECT_FALSE(reducible(DataType::i32, ReduceOp::avg));
  EXPECT_TRUE(reducible(DataType::bf16, ReduceOp::avg));
}

TEST(Reduce, BoolIsOrAndAnd) {
  expect_reduced<std::uint8_t>(DataType::boolean, ReduceOp::sum, {{0, 0, 1, 1}, {0, 1, 0, 1}}, {0, 1, 1, 1});
  expect_reduced<std::uint8_t>(DataType::boolean, ReduceOp::product, {{0, 0, 1, 1}, {0, 1, 0, 1}}, {0, 0, 0, 1});
}

// A rank reduces whatever slice, chunk or tile it is given: the bits of an element may not depend on where that begins.
TEST(Reduce, AnElementGetsTheSameBitsAtAnyOffsetAndLength) {
  constexpr std::size_t kElements = 5'000, kMostInputs = 8, kCases = 60;
  constexpr DataType kTypes[] = {DataType::f32, DataType::f64, DataType::f16, DataType::bf16,
                                 DataType::i32, DataType::i64, DataType::u8,  DataType::boolean};
  constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::product};
  std::mt19937_64 random(20'231);
  for (const DataType dtype : kTypes) {
    const std::size_t width = element_size(dtype);
    for (const ReduceOp op : kOps) {
      if (!reducible(dtype, op)) continue;
      // Except for bool, any bits are a number. NaN is avoided: which of two NaNs is the result depends on the
      // instruction. The mask 0xBB clears exponent bits in a float's highest byte, so it is never that of a NaN.
      const bool is_float =
          dtype == DataType::f32 || dtype == DataType::f64 || dtype == DataType::f16 || dtype == DataType::bf16;
      std::vector<std::vector<std::byte>> inputs(kMostInputs, std::vector<std::byte>(kElements * width));
      for (auto& input : inputs)
        for (std::size_t at = 0; at < input.size(); ++at) {
          const bool is_highest = is_float && at % width == width - 1;
          input[at] = static_cast<std::byte>(random() & (dtype == DataType::boolean ? 1U : is_highest ? 0xBBU : 0xFFU));
        }
      for (const ReduceKernel kernel : kernels_for(dtype, op)) {
        for (std::size_t one = 0; one < kCases; ++one) {
          const int n = 1 + static_cast<int>(random() % kMostInputs);
          std::vector<const void*> pointers;
          for (int k = 0; k < n; ++k) pointers.push_back(inputs[static_cast<std::size_t>(k)].data());
          std::vector<std::byte> whole(kElements * width);
          kernel(whole.data(), pointers.data(), n, kElements);
          const std::size_t begin = random() % kElements;
          const std::size_t count = random() % (one % 2 == 0 ? 70 : kElements - begin + 1);
          const std::size_t length = std::min(count, kElements - begin);
          // The alignment in memory is independent of the offset in the whole range: any element boundary.
          std::vector<std::byte> out((length + 64) * width, std::byte{0xEE});
          std::byte* const to = out.data() + random() % 32 * width;
          for (const void*& pointer : pointers) pointer = static_cast<const std::byte*>(pointer) + begin * width;
          kernel(to, pointers.data(), n, length);
          ASSERT_EQ(std::memcmp(to, whole.data() + begin * width, length * width), 0)
              << name_of(dtype) << " " << name_of(op) << " of " << n << ", elements " << begin << " to "
              << begin + length;
          ASSERT_EQ(to[length * width], std::byte{0xEE}) << "written beyond its end";
        }
      }
    }
  }
}

}  // namespace
}  // namespace phalanx
