// Philox4x32-10: random numbers as a pure function of (key, counter).
//
// Each counter value gives four 32-bit words. There is no state to save or share, and the numbers are the same on every
// machine. (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.) PhiloxStream draws numbers in
// sequence, for code that needs a generator, such as sampling. tensor/counter_fill.h has a vectorised form for filling
// tensors.
//
//   std::array<std::uint32_t, 4> words = philox4x32({position, 0, 0, 0}, {seed, 0});
//   PhiloxStream stream(seed, /*substream=*/step);
//   double u = stream.uniform();             // [0, 1)
//   std::uint64_t i = stream.below(count);   // without bias
#pragma once

#include <array>
#include <cstdint>

namespace phalanx {

using PhiloxCounter = std::array<std::uint32_t, 4>;  // the least significant word first
using PhiloxKey = std::array<std::uint32_t, 2>;

constexpr PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53;
  constexpr std::uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9;  // golden ratio
  constexpr std::uint32_t kWeyl1 = 0xBB67AE85;  // square root of three, less one
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = kMultiplier0 * counter[0];
    const std::uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

/// A sequence of draws: key = seed, high half of the counter = substream. Streams of two substreams never overlap.
/// position() and seek() let a resumed run continue in the middle.
class PhiloxStream {
 public:
  explicit constexpr PhiloxStream(std::uint64_t seed, std::uint64_t substream = 0)
      : key_{low(seed), high(seed)}, substream_(substream) {}

  constexpr std::uint32_t next_u32() {
    const std::uint64_t block = position_ / 4;
    if (!filled_ || block != block_) {
      words_ = philox4x32({low(block), high(block), low(substream_), high(substream_)}, key_);
      block_ = block;
      filled_ = true;
    }
    return words_[position_++ % 4];
  }
  constexpr std::uint64_t next_u64() {
    const std::uint64_t first = next_u32();
    return first | static_cast<std::uint64_t>(next_u32()) << 32;
  }
  /// A multiple of 2^-53 in [0, 1).
  constexpr double uniform() { return static_cast<double>(next_u64() >> 11) * 0x1p-53; }

  /// Uniform over 0 ... bound - 1; bound > 0. Draws again in the rare case that would favour small values.
  constexpr std::uint64_t below(std::uint64_t bound) {
    const std::uint64_t rejected_below = (0 - bound) % bound;  // 2^64 mod bound
    std::uint64_t value = next_u64();
    while (value < rejected_below) value = next_u64();
    return value % bound;
  }

  constexpr std::uint64_t position() const { return position_; }  // 32-bit words drawn
  constexpr void seek(std::uint64_t position) { position_ = position; }

 private:
  static constexpr std::uint32_t low(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
  static constexpr std::uint32_t high(std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); }

  PhiloxKey key_;
  std::uint64_t substream_;
  std::uint64_t position_ = 0;
  std::uint64_t block_ = 0;
  PhiloxCounter words_{};
  bool filled_ = false;
};

}  // namespace phalanx
