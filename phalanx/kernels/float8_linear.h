// y = x W^T with products of float8 numbers in all three directions: y = x W^T, dx = dy W, dW = dy^T x.
//
// The factors are cast with dynamic scaling (float8_cast.h) each time they are used. Results have x's type,
// or autocast's; the weight's gradient has its own, and goes where kernels/linear.h would put it. As in
// torchao's recipes of the same names,
//
//   tensorwise   one scale a matrix; x and W in e4m3, dy in e5m2
//   rowwise      one scale a row of a factor, along the dimension that is not summed over; e4m3 throughout; scales are
//                powers of two
//
// A weight that is wider than x, as under autocast, is rounded to x's type before the cast. So a layout that gathers
// weights in that type has the same numbers.
//
//   const Float8LinearOptions options{.recipe = Float8Recipe::rowwise};
//   at::Tensor y = float8_linears(x, {weight}, std::make_shared<Float8LinearOptions>(options))[0];
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "phalanx/kernels/float8_cast.h"

namespace phalanx::kernels {

struct Float8LinearOptions {
  Float8Recipe recipe = Float8Recipe::tensorwise;
  bool emulate = false;  // products in float32, on any device; on the CPU always
  /// How the weight is cut over ranks: rows, if each rank computes some columns of y from all of x; columns, if each
  /// has some columns of x and computes addends of y.
  Float8Cut cut = Float8Cut::none;
  MaxOverRanks max_over_ranks = nullptr;  // of these ranks; required if it is cut
};

/// Up to three weights [out_i, in] that share x [..., in]; x is cast once. Results: [..., out_i]. Differentiable once.
/// Without rows it multiplies as kernels::linear() does.
/// REQUIRES: in and out_i are multiples of 16.
std::vector<at::Tensor> float8_linears(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                       const std::shared_ptr<const Float8LinearOptions>& options);

inline at::Tensor float8_linear(const at::Tensor& x, const at::Tensor& weight,
                                const std::shared_ptr<const Float8LinearOptions>& options) {
  return float8_linears(x, {weight}, options)[0];
}

}  // namespace phalanx::kernels
