// Compiled with -ffp-contract=off: a fused multiply-add on one machine and not on another would change the bits.
#include "phalanx/tensor/counter_fill.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace phalanx {
namespace {

constexpr int kBlocks = 64;             // Philox blocks computed together, one per vector lane
constexpr int kElements = 4 * kBlocks;  // four words a block

/// Words 0..3 of blocks first .. first + kBlocks - 1, as words[w][block].
void philox_blocks(std::uint64_t key, std::uint64_t first, std::uint32_t (&words)[4][kBlocks]) {
  for (int i = 0; i < kBlocks; ++i) {
    words[0][i] = static_cast<std::uint32_t>(first + i);
    words[1][i] = static_cast<std::uint32_t>((first + i) >> 32);
    words[2][i] = 0;
    words[3][i] = 0;
  }
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kBlocks; ++i) {
      const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * words[0][i];
      const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * words[2][i];
      const std::uint32_t w1 = words[1][i], w3 = words[3][i];
      words[0][i] = static_cast<std::uint32_t>(p1 >> 32) ^ w1 ^ k0;
      words[1][i] = static_cast<std::uint32_t>(p1);
      words[2][i] = static_cast<std::uint32_t>(p0 >> 32) ^ w3 ^ k1;
      words[3][i] = static_cast<std::uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

/// 24 bits to (0, 1]: never 0, so that its logarithm is finite.
float open_unit(std::uint32_t word) {
  return (static_cast<float>(static_cast<std::int32_t>(word >> 8)) + 0.5f) * 0x1p-24f;
}
/// 24 bits to [0, 1).
float unit(std::uint32_t word) { return static_cast<float>(static_cast<std::int32_t>(word >> 8)) * 0x1p-24f; }

/// ln x for normal x > 0: x = m 2^e with m in [sqrt(1/2), sqrt(2)), then a degree-8 polynomial in m - 1 (Cephes).
float natural_log(float x) {
  const std::int32_t bits = std::bit_cast<std::int32_t>(x) - 0x3f3504f3;  // sqrt(1/2)
  const float e = static_cast<float>(bits >> 23);
  const float f = std::bit_cast<float>((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  const float z = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  float y = f * z * p;
  y = y + e * -2.12194440e-4f;
  y = y - 0.5f * z;
  return (f + y) + e * 0.693359375f;
}

/// sin and cos of 2 pi turn, turn in [0, 1): the quarter is taken off, then polynomials on [-pi/4, pi/4] (Cephes).
void sin_cos_turn(float turn, float& sine, float& cosine) {
  // NOLINTNEXTLINE(bugprone-incorrect-roundings): turn is not negative, and lround() would stop vectorisation
  const std::int32_t quarter = static_cast<std::int32_t>(turn * 4.0f + 0.5f);
  const float x = (turn - static_cast<float>(quarter) * 0.25f) * 6.28318530718f;
  const float z = x * x;
  const float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * x + x;
  const float c =
      ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
  const bool swap = (quarter & 1) != 0;
  const float a = swap ? c : s;
  const float b = swap ? s : c;
  sine = (quarter & 2) != 0 ? -a : a;
  cosine = ((quarter + 1) & 2) != 0 ? -b : b;
}

struct Uniform {
  float low, width;
  void operator()(const std::uint32_t (&words)[4][kBlocks], float (&out)[kElements]) const {
    for (int i = 0; i < kBlocks; ++i) {
      for (int w = 0; w < 4; ++w) out[4 * i + w] = low + width * unit(words[w][i]);
    }
  }
};

struct Normal {
  float mean, std;
  void operator()(const std::uint32_t (&words)[4][kBlocks], float (&out)[kElements]) const {
    for (int i = 0; i < kBlocks; ++i) {
      for (int w = 0; w < 4; w += 2) {
        const float radius = std * std::sqrt(-2.0f * natural_log(open_unit(words[w][i])));
        float sine, cosine;
        sin_cos_turn(unit(words[w + 1][i]), sine, cosine);
        out[4 * i + w] = mean + radius * cosine;
        out[4 * i + w + 1] = mean + radius * sine;
      }
    }
  }
};

/// Whole groups of kElements go straight to `out`; a group cut by the range's edges goes through a buffer.
template <class Map>
void fill(std::uint64_t key, std::uint64_t begin, std::span<float> out, const Map& map) {
  std::uint32_t words[4][kBlocks];
  float values[kElements];
  const std::uint64_t end = begin + out.size();
  for (std::uint64_t group = begin / kElements; group * kElements < end; ++group) {
    philox_blocks(key, group * kBlocks, words);
    map(words, values);
    const std::uint64_t first = group * kElements;
    const std::uint64_t from = std::max(first, begin), to = std::min(first + kElements, end);
    std::memcpy(out.data() + (from - begin), values + (from - first), (to - from) * sizeof(float));
  }
}

/// The finaliser of splitmix64: every input bit reaches every output bit.
std::uint64_t mix_bits(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

}  // namespace

std::uint64_t stream_key(std::uint64_t seed, std::string_view name) {
  std::uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return mix_bits(mix_bits(seed + 0x9E3779B97F4A7C15u) ^ hash);
}

void fill_uniform(std::uint64_t key, std::uint64_t begin, std::span<float> out, float low, float high) {
  fill(key, begin, out, Uniform{low, high - low});
}

void fill_normal(std::uint64_t key, std::uint64_t begin, std::span<float> out, float mean, float std) {
  fill(key, begin, out, Normal{mean, std});
}

}  // namespace phalanx
