// Rotary position embedding: query and key vectors are turned by angles that grow with the position, so that their dot
// product depends on the distance alone.
//
// Element i of a head is paired with element i + head_dim / 2 ("rotate-half", Hugging Face's pairing), by the angle
// position * theta^(-2 i / head_dim). The tables are fp32 and made once for max_len positions.
//
//   RotaryTables rope = rotary_tables(head_dim, max_seq_len, theta);
//   q = kernels::apply_rotary(q, rope.cos, rope.sin);      // [batch, heads, seq, head_dim]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace phalanx::nn {

/// cos and sin: [positions, head_dim / 2], or [batch, positions, head_dim / 2] where rows stand at different places.
struct RotaryTables {
  at::Tensor cos;
  at::Tensor sin;
  /// Positions first .. first + count - 1: views.
  RotaryTables narrow(std::int64_t first, std::int64_t count) const;
  /// Given int64 positions [batch, count].
  RotaryTables at_positions(const at::Tensor& positions) const;
};

RotaryTables rotary_tables(std::int64_t head_dim, std::int64_t max_len, double theta, at::Device device = at::kCPU);

}  // namespace phalanx::nn
