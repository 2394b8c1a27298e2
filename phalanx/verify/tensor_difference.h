// Measures how far a rank's part of a tensor is from what it should be.
//
//   const TensorDifference d = difference_of(rows, expected, expected_norm, {4, 0});
//   d.relative;                   // 2-norm of the difference, relative to that of the whole expected tensor
//   d.index, d.ulps;              // the element with the largest difference, and that difference in float32 numbers
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace phalanx::verify {

struct TensorDifference {
  double relative = 0;   // infinite if something is not finite
  double explained = 0;  // the part of it that known differences explain
  double largest = 0;    // |found - expected| of the element with the largest difference
  double found = 0, expected = 0;
  std::int64_t ulps = 0;            // float32 numbers between these two
  std::vector<std::int64_t> index;  // in the full tensor; empty if nothing was compared
  double unexplained() const { return relative - explained; }
};

/// REQUIRES: both have the same shape; any device. `offset`: where they begin in the full tensor; empty: at its start.
TensorDifference difference_of(const at::Tensor& found, const at::Tensor& expected, double expected_norm,
                               const std::vector<std::int64_t>& offset = {});

/// Serializes a difference, to send it to another rank.
std::string to_text(const TensorDifference& difference);
TensorDifference difference_from_text(const std::string& text);

/// Float32 numbers from a to b; the largest value if one of them is NaN.
std::int64_t ulps_between(float a, float b);

}  // namespace phalanx::verify
