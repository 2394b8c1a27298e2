// The gradient of a linear layer's weight, from 16-bit factors too.
#pragma once

#include <c10/core/DeviceType.h>

#include "phalanx/tensor/weight_gradient.h"

namespace phalanx::kernels {

/// Whether at::mm and at::addmm have an out_dtype there: products of 16-bit factors in float32.
/// libtorch has it for CUDA.
bool has_out_dtype(at::DeviceType type);

/// dweight.out = dweight.beta * dweight.out + dy^T x; dy [rows, out], x [rows, in].
///
/// `out` may be float32 while dy and x have 16 bits. With an out_dtype, as on a GPU, the sum then is never rounded to
/// 16 bits. Without, as on the CPU, the product is, once, before it is added.
void add_weight_product(const at::Tensor& dy, const at::Tensor& x, const WeightGradient& dweight);

}  // namespace phalanx::kernels
