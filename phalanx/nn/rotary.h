// Rotary position embedding: query and key vectors are rotated by angles that grow with the position, so that their dot
// product depends only on the distance.
//
// Element i of a head is paired with element i + head_dim / 2 ("rotate-half", Hugging Face's pairing). The angle is
// position * theta^(-2 i / head_dim), stretched as in rope_scaling.h. The tables are fp32 and cover max_len positions.
//
//   RotaryTables rope = rotary_tables({.head_dim = 64, .theta = 500000.0}, max_seq_len);
//   q = kernels::apply_rotary(q, rope.cos, rope.sin);      // [batch, heads, seq, head_dim]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "phalanx/models/config/rope_scaling.h"

namespace phalanx::nn {

/// cos and sin: [positions, head_dim / 2], or [batch, positions, head_dim / 2] if rows are at different positions.
struct RotaryTables {
  at::Tensor cos;
  at::Tensor sin;
  /// Positions first .. first + count - 1: views.
  RotaryTables narrow(std::int64_t first, std::int64_t count) const;
  /// The tables at the given int64 positions [batch, count].
  RotaryTables at_positions(const at::Tensor& positions) const;
};

struct RotaryOptions {
  std::int64_t head_dim = 0;  // its rotated elements
  double theta = 10000.0;
  RopeScaling scaling;
  std::int64_t longest = 0;  // tokens of the longest sequence so far; dynamic scaling and longrope use it
};

RotaryTables rotary_tables(const RotaryOptions& options, std::int64_t max_len, at::Device device = at::kCPU);

}  // namespace phalanx::nn
