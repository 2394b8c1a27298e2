// How far what a rank has of a tensor is from what it should be.
//
//   const TensorDifference d = difference_of(rows, expected, expected_norm, {4, 0});
//   d.relative;                   // 2-norm of the difference, relative to that of the whole expected tensor
//   d.index, d.ulps;              // the element that is furthest off, and by how many float32 numbers
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace phalanx::train {

struct TensorDifference {
  double relative = 0;   // infinite where something is not finite
  double explained = 0;  // of that, what differences that are known of account for
  double largest = 0;    // |found - expected| of the element that is furthest off
  double found = 0, expected = 0;
  std::int64_t ulps = 0;            // float32 numbers between these two
  std::vector<std::int64_t> index;  // in the whole tensor; empty where nothing is compared
  double unexplained() const { return relative - explained; }
};

/// Of one shape, on any device. `offset`: where the tensors begin in the whole; none: there.
TensorDifference difference_of(const at::Tensor& found, const at::Tensor& expected, double expected_norm,
                               const std::vector<std::int64_t>& offset = {});

/// For sending one to another rank, and what comes of it there.
std::string to_text(const TensorDifference& difference);
TensorDifference difference_from_text(const std::string& text);

/// Float32 numbers from a to b; the most there are where one of them is not a number.
std::int64_t ulps_between(float a, float b);

}  // namespace phalanx::train
