#include "phalanx/data/permutation.h"

#include <bit>

namespace phalanx::data {
namespace {

std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace

Permutation::Permutation(std::int64_t size, std::array<std::uint64_t, 2> key) : size_(size) {
  const int bits = size > 1 ? std::bit_width(static_cast<std::uint64_t>(size - 1)) : 0;
  half_bits_ = (bits + 1) / 2;
  std::uint64_t state = splitmix64(splitmix64(key[0]) ^ (key[1] * 0xD1342543DE82EF95ull));
  for (std::uint64_t& round_key : round_keys_) {
    state = splitmix64(state);
    round_key = state;
  }
}

std::int64_t Permutation::operator()(std::int64_t index) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  auto value = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = value >> half_bits_;
    std::uint64_t right = value & mask;
    for (const std::uint64_t round_key : round_keys_) {
      const std::uint64_t next = left ^ (splitmix64(right ^ round_key) & mask);
      left = right;
      right = next;
    }
    value = left << half_bits_ | right;
  } while (value >= static_cast<std::uint64_t>(size_));
  return static_cast<std::int64_t>(value);
}

}  // namespace phalanx::data
