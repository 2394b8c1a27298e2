#include "phalanx/optim/stochastic_rounding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

#include "phalanx/optim/instruction_sets.h"

namespace phalanx {
namespace {

constexpr std::uint32_t kStepWeyl = 0x9E3779B9, kHighWeyl = 0x85EBCA6B;
constexpr std::uint32_t kFirst = 0x7FEB352D, kSecond = 0x846CA68B;  // multipliers whose mix has little bias

constexpr std::uint32_t mixed(std::uint32_t x, std::uint32_t between = 0) {
  x ^= x >> 16;
  x *= kFirst;
  x ^= x >> 15;
  x += between;
  x *= kSecond;
  x ^= x >> 16;
  return x;
}

constexpr std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
constexpr std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

// Of elements whose index has the same upper half.
PHALANX_INSTRUCTION_SETS
void round_range(std::uint32_t before, std::uint32_t between, std::uint32_t first, std::size_t count,
                 const float* __restrict from, std::uint16_t* __restrict to) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t added = mixed((first + static_cast<std::uint32_t>(i)) ^ before, between) >> 16;
    const auto bits = __builtin_bit_cast(std::uint32_t, from[i]);
    const std::uint32_t size = bits & 0x7FFFFFFF;
    const std::uint32_t rounded = (size < 0x7F800000 ? bits + added : bits) >> 16;
    to[i] = static_cast<std::uint16_t>(size > 0x7F800000 ? 0x7FC0 : rounded);
  }
}

// In int64, whose low 32 bits are those of an unsigned product.
constexpr std::int64_t kWord = 0xFFFFFFFF;

void mix_(at::Tensor& x, const at::Tensor& between = {}) {
  x.bitwise_xor_(x.bitwise_right_shift(16)).mul_(std::int64_t{kFirst}).bitwise_and_(kWord);
  x.bitwise_xor_(x.bitwise_right_shift(15));
  if (between.defined()) x.add_(between);
  x.mul_(std::int64_t{kSecond}).bitwise_and_(kWord);
  x.bitwise_xor_(x.bitwise_right_shift(16));
}

}  // namespace

RoundingKey rounding_key(std::uint64_t stream, std::uint64_t step) {
  const std::uint32_t of_step = mixed(low(stream) + low(step) * kStepWeyl);
  return {.before = of_step, .between = mixed(of_step ^ high(stream))};
}

void round_stochastically(RoundingKey key, std::uint64_t first, std::size_t count, const float* from,
                          std::uint16_t* to) {
  while (count > 0) {
    const std::uint64_t to_next = (std::uint64_t{1} << 32) - low(first);
    const std::size_t part = count < to_next ? count : static_cast<std::size_t>(to_next);
    round_range(key.before + high(first) * kHighWeyl, key.between, low(first), part, from, to);
    first += part;
    count -= part;
    from += part;
    to += part;
  }
}

at::Tensor round_stochastically(std::uint64_t stream, const at::Tensor& step, const at::Tensor& indices,
                                const at::Tensor& values) {
  at::Tensor before = step.to(at::kLong).mul(std::int64_t{kStepWeyl}).add_(std::int64_t{low(stream)});
  before.bitwise_and_(kWord);
  mix_(before);
  at::Tensor between = before.bitwise_xor(std::int64_t{high(stream)});
  mix_(between);
  at::Tensor x = indices.bitwise_right_shift(32).mul_(std::int64_t{kHighWeyl}).add_(before).bitwise_and_(kWord);
  x.bitwise_xor_(indices.bitwise_and(kWord));  // each element's index, mixed with the key
  mix_(x, between);
  const at::Tensor wide = values.contiguous().flatten();
  const at::Tensor bits = wide.view(at::kInt).to(at::kLong).bitwise_and_(kWord);
  at::Tensor sum = bits.add(x.bitwise_right_shift_(16)).bitwise_and_(0xFFFF0000);
  sum = sum.sub(at::where(sum.ge(std::int64_t{1} << 31), std::int64_t{1} << 32, std::int64_t{0}));
  const at::Tensor rounded = sum.to(at::kInt).view(at::kFloat);
  return at::where(wide.isfinite(), rounded, wide).to(at::kBFloat16).view(values.sizes());
}

}  // namespace phalanx
