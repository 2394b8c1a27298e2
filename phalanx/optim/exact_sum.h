// ExactSum: a sum of doubles without any rounding until it is read, so that the order of the addends, and how they are
// spread over threads and ranks, cannot change it.
//
// It is one long fixed-point number that reaches from the smallest denormal past the sum of 2^63 of the largest
// doubles, in words of 64 bits that hold 32 each: an addition touches three of them and carries nothing; what has
// piled up in their upper halves is carried every million additions. NaNs and infinities are counted apart.
//
// Contract
// - Any doubles, in any order. value() is the exact sum rounded once, to the nearest, ties to even, infinite
//   where that is past the largest double. NaNs and infinities among the addends count as in IEEE 754: one NaN, or
//   infinities of both signs, make NaN. A sum of no addends is 0.
// - words() of several sums, added word by word (as an all_reduce of int64 does; up to 2^30 of them), are the words of
//   the whole sum.
// - Knows no torch. Used by one thread at a time.
//
//   ExactSum sum;
//   sum.add(1e300); sum.add(1); sum.add(-1e300);
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
    // value = mantissa * 2^(position - 1074); a denormal lies where the smallest normal number does.
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
  void carry();  // makes all limbs but the last, which has the sign, 0 to 2^32 - 1

  std::array<std::int64_t, kLimbs> limbs_{};  // of 2^(32 i - 1074)
  std::int64_t nans_ = 0, infinities_ = 0, negative_infinities_ = 0;
  std::uint32_t pending_ = 0;  // additions since the last carry
};

}  // namespace phalanx
