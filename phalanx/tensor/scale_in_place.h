// Multiplication by a factor that keeps its bits where the elements have 16.
//
//   scale_in_place(gradient, loss_gradient / tokens);
//
// ATen's mul_() rounds a factor of 1/tokens to the 16 bits of the gradient: on a GPU if it is a tensor without
// dimensions there, on the CPU if it is a number (as of 2.13). Each element would be wrong by up to 0.4 %, all in the
// same direction.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx {

/// x *= factor, in x's memory. It is computed in fp32, or in fp64 if x is. `factor` has one element, on x's device. The
/// host does not wait.
void scale_in_place(const at::Tensor& x, const at::Tensor& factor);

void scale_in_place(const at::Tensor& x, double factor);

/// x * factor, computed likewise, in x's type.
at::Tensor scaled(const at::Tensor& x, const at::Tensor& factor);

}  // namespace phalanx
