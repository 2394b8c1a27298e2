// A pseudo-random permutation of [0, size) as a pure function of a key, without a table.
//
// A balanced Feistel network permutes the smallest even power of two that holds `size`. Values outside the range are
// permuted again until they are inside (cycle-walking); on average that is at most four times as many rounds. So the
// shuffle of any number of samples costs no memory, and the position in it is a single integer.
//
//   Permutation order(samples, {seed, epoch});
//   order(k);  // each k in [0, samples) gives another sample
#pragma once

#include <array>
#include <cstdint>

namespace phalanx::data {

class Permutation {
 public:
  Permutation(std::int64_t size, std::array<std::uint64_t, 2> key);
  std::int64_t operator()(std::int64_t index) const;
  std::int64_t size() const { return size_; }

 private:
  static constexpr int kRounds = 6;
  std::int64_t size_;
  int half_bits_;
  std::array<std::uint64_t, kRounds> round_keys_;
};

}  // namespace phalanx::data
