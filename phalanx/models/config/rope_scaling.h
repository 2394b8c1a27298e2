// How the rotary embedding's angles are stretched for sequences longer than those of the original training.
//
// f: the frequency of a pair, theta^(-2 i / head_dim); n: original_max_seq_len.
//   linear   f / factor
//   llama3   f for wavelengths below n / high_freq_factor, f / factor above n / low_freq_factor, a blend in between
//   dynamic  f unchanged for sequences of up to n tokens; for s > n tokens theta is multiplied by
//            (factor s / n - factor + 1)^(head_dim / (head_dim - 2)). All positions of a pass use the length of the
//            longest sequence seen so far.
//   yarn     f for pairs that turn more than beta_fast times within n tokens, f / factor for those that turn less than
//            beta_slow times, a blend in between
//   longrope f / short_factor[i] for sequences of up to n tokens, f / long_factor[i] for longer ones
// With yarn and longrope the rotated queries and keys are multiplied by attention_factor. With mscale_all_dim, which
// latent attention has, all scores are multiplied by score_factor().
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace phalanx {

enum class RopeScalingType : std::uint8_t { none, linear, dynamic, llama3, yarn, longrope };

struct RopeScaling {
  RopeScalingType type = RopeScalingType::none;
  double factor = 1.0;
  double low_freq_factor = 1.0;           // llama3
  double high_freq_factor = 4.0;          // llama3
  std::int64_t original_max_seq_len = 0;  // llama3, dynamic, yarn, longrope
  double attention_factor = 1.0;          // yarn, longrope
  double beta_fast = 32.0;                // yarn
  double beta_slow = 1.0;                 // yarn
  bool truncate = true;                   // yarn: the blend begins and ends at whole pairs
  double mscale_all_dim = 0.0;            // yarn; 0: scores stay as they are
  std::vector<double> short_factor;       // longrope: one per pair
  std::vector<double> long_factor;        // longrope

  /// Whether the angles of all positions depend on how long the sequence is, for sequences beyond original_max_seq_len.
  bool depends_on_length() const noexcept {
    return type == RopeScalingType::dynamic || type == RopeScalingType::longrope;
  }

  double score_factor() const noexcept {
    if (mscale_all_dim == 0.0 || factor <= 1.0) return 1.0;
    const double scale = 0.1 * mscale_all_dim * std::log(factor) + 1.0;
    return scale * scale;
  }

  bool operator==(const RopeScaling&) const = default;
};

}  // namespace phalanx
