// ExactSum: a sum of doubles that is rounded only when it is read. So the order of the addends, and how they are spread
// over threads and ranks, cannot change it.
//
// It is one long fixed-point number. Its range is from the smallest denormal to beyond the sum of 2^63 of the largest
// doubles. It is stored in words of 64 bits that hold 32 bits each. An addition touches three words and carries
// nothing. The upper halves are carried every million additions. NaNs and infinities are counted separately.
//
// Contract
// - Any doubles, in any order. value() is the exact sum rounded once, to nearest, ties to even. It is infinite if the
//   sum is past the largest double. NaNs and infinities among the addends count as in IEEE 754: one NaN, or infinities
//   of both signs, make NaN. A sum of no addends is 0.
// - The words() of several sums, added word by word (as an all_reduce of int64 does; up to 2^30 sums), are the words of
//   the whole sum.
// - Torch-free. For one thread at a time.
//
//   ExactSum sum;
//   sum.add(1e300);
//   sum.add(1);
//   sum.add(-1e300);
//   sum.value();                                     // 1
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace phalanx {

class ExactSum {
  static constexpr std::size_t kLimbs = 68;

 public:
  static constexpr std::size_t kWords = kLimbs + 3;
  using Words = std::array<std::int64_t, kWords>;

  void add(double value) {
    const auto bits = std::bit_cast<std::uint64_t>(value);
    const std::uint64_t exponent = bits >> 52 & 0x7FF;
    if (exponent == 0x7FF) return add_special(value);
    // value = mantissa * 2^(position - 1074). A denormal has the position of the smallest normal number.
    const std::uint64_t mantissa = (bits & 0xFFFFFFFFFFFFF) | (std::uint64_t{exponent != 0} << 52);
    const std::uint64_t position = exponent - (exponent != 0);
    const std::uint64_t shift = position % 32;
    const std::uint64_t low = mantissa << shift;               // bits 0 to 63 of the shifted one
    const std::uint64_t high = mantissa >> 1 >> (63 - shift);  // bits 64 to 83
    const auto sign = -static_cast<std::int64_t>(bits >> 63);  // 0, or all ones
    std::int64_t* const limb = limbs_.data() + position / 32;
    limb[0] += (static_cast<std::int64_t>(low & 0xFFFFFFFF) ^ sign) - sign;
    limb[1] += (static_cast<std::int64_t>(low >> 32) ^ sign) - sign;
    limb[2] += (static_cast<std::int64_t>(high) ^ sign) - sign;
    if (++pending_ == kMaxPending) carry();
  }

  void merge(const ExactSum& other);
  double value() const;

  Words words() const;
  static ExactSum from_words(const Words& words);

 private:
  // Each addition changes a limb by less than 2^32: 2^31 of them would still fit.
  static constexpr std::uint32_t kMaxPending = 1U << 20;

  void add_special(double value);
  void carry();  // brings all limbs but the last, which has the sign, into 0 .. 2^32 - 1

  std::array<std::int64_t, kLimbs> limbs_{};  // limb i has the weight 2^(32 i - 1074)
  std::int64_t nans_ = 0, infinities_ = 0, negative_infinities_ = 0;
  std::uint32_t pending_ = 0;  // additions since the last carry
};

}  // namespace phalanx
