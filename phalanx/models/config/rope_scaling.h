// How the rotary embedding's angles are stretched for sequences longer than those of the original training.
//
// f: the frequency of a pair, theta^(-2 i / head_dim); n: original_max_seq_len.
//   linear   f / factor
//   llama3   f for wavelengths below n / high_freq_factor, f / factor above n / low_freq_factor, a blend in between
//   dynamic  f unchanged for sequences of up to n tokens; for s > n tokens theta is multiplied by
//            (factor s / n - factor + 1)^(head_dim / (head_dim - 2)). All positions of a pass use the length of the
//            longest sequence seen so far.
#pragma once

#include <cstdint>

namespace phalanx {

enum class RopeScalingType : std::uint8_t { none, linear, dynamic, llama3 };

struct RopeScaling {
  RopeScalingType type = RopeScalingType::none;
  double factor = 1.0;
  double low_freq_factor = 1.0;           // llama3
  double high_freq_factor = 4.0;          // llama3
  std::int64_t original_max_seq_len = 0;  // llama3, dynamic

  bool operator==(const RopeScaling&) const = default;
};

}  // namespace phalanx
