// The gradient of a linear layer's weight, from 16-bit factors too.
#pragma once

#include "phalanx/tensor/weight_gradient.h"

namespace phalanx::kernels {

/// dweight.out = dweight.beta * dweight.out + dy^T x; dy [rows, out], x [rows, in].
///
/// `out` may be float32 while dy and x have 16 bits. On a GPU the sum then is never rounded to 16 bits. On the CPU the
/// product is, once, before it is added.
void add_weight_product(const at::Tensor& dy, const at::Tensor& x, const WeightGradient& dweight);

}  // namespace phalanx::kernels
