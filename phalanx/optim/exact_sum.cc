#include "phalanx/optim/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace phalanx {
namespace {

constexpr int kMantissaBits = 53;
constexpr int kLowestExponent = -1074;

}  // namespace

void ExactSum::add_special(double value) {
  if (std::isnan(value)) {
    ++nans_;
  } else {
    ++(value > 0 ? infinities_ : negative_infinities_);
  }
}

void ExactSum::carry() {
  std::int64_t carried = 0;
  for (std::size_t i = 0; i + 1 < kLimbs; ++i) {
    const std::int64_t sum = limbs_[i] + carried;
    limbs_[i] = sum & 0xFFFFFFFF;
    carried = sum >> 32;  // rounds down, also below 0: the remainder is never negative
  }
  limbs_[kLimbs - 1] += carried;
  pending_ = 0;
}

ExactSum::Words ExactSum::words() const {
  ExactSum carried = *this;
  carried.carry();
  Words words;
  std::copy(carried.limbs_.begin(), carried.limbs_.end(), words.begin());
  words[kLimbs] = nans_;
  words[kLimbs + 1] = infinities_;
  words[kLimbs + 2] = negative_infinities_;
  return words;
}

ExactSum ExactSum::from_words(const Words& words) {
  ExactSum sum;
  std::copy_n(words.begin(), kLimbs, sum.limbs_.begin());
  sum.nans_ = words[kLimbs];
  sum.infinities_ = words[kLimbs + 1];
  sum.negative_infinities_ = words[kLimbs + 2];
  sum.carry();
  return sum;
}

void ExactSum::merge(const ExactSum& other) {
  Words sum = words();
  const Words addend = other.words();
  for (std::size_t i = 0; i < kWords; ++i) sum[i] += addend[i];
  *this = from_words(sum);
}

double ExactSum::value() const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (nans_ > 0 || (infinities_ > 0 && negative_infinities_ > 0)) return std::numeric_limits<double>::quiet_NaN();
  if (infinities_ > 0) return kInfinity;
  if (negative_infinities_ > 0) return -kInfinity;

  ExactSum sum = *this;
  sum.carry();
  const bool negative = sum.limbs_[kLimbs - 1] < 0;
  if (negative) {
    for (auto& limb : sum.limbs_) limb = -limb;
    sum.carry();
  }
  const double sign = negative ? -1 : 1;
  const auto limb = [&](std::size_t i) { return static_cast<std::uint64_t>(sum.limbs_[i]); };

  std::size_t top = kLimbs - 1;
  while (top > 0 && limb(top) == 0) --top;
  if (top >= kLimbs - 2) return sign * kInfinity;  // beyond 2^1024
  const int top_bit = static_cast<int>(std::bit_width(limb(top))) - 1;
  const int position = static_cast<int>(top) * 32 + top_bit;
  if (position < kMantissaBits) {  // nothing to round, denormal or not; top is 0 or 1, or the sum is 0
    return sign * std::ldexp(static_cast<double>(limb(1) << 32 | limb(0)), kLowestExponent);
  }
  // The 64 bits from the highest one down, and whether any lower bit is set.
  std::uint64_t leading = limb(top) << (63 - top_bit) | limb(top - 1) << (31 - top_bit);
  bool below = false;
  std::size_t rest = top - 1;  // limbs below this one were not looked at
  if (top >= 2) {
    leading |= limb(top - 2) >> (top_bit + 1);
    below = (limb(top - 2) & ((std::uint64_t{2} << top_bit) - 1)) != 0;
    rest = top - 2;
  }
  for (std::size_t i = 0; i < rest; ++i) below = below || limb(i) != 0;
  constexpr int kDropped = 64 - kMantissaBits;
  constexpr std::uint64_t kHalf = std::uint64_t{1} << (kDropped - 1);
  std::uint64_t mantissa = leading >> kDropped;
  const std::uint64_t dropped = leading & (2 * kHalf - 1);
  if (dropped > kHalf || (dropped == kHalf && (below || (mantissa & 1) != 0))) ++mantissa;
  return sign * std::ldexp(static_cast<double>(mantissa), position - (kMantissaBits - 1) + kLowestExponent);
}

}  // namespace phalanx
