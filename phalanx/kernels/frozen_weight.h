// Products with a frozen weight that is stored in fewer bits than the activations have: in 16 bits, under activations
// in fp32. The weight is widened for the product and again for the input's gradient. No wide copy of it is kept in
// between; on the host only some rows are wide at a time (wide_rows.h).
//
//   if (is_narrow_weight(x, weight)) return frozen_linear(x, weight, bias);
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// Whether a product of x has to widen this weight: x is in fp32, there is no autocast, and the weight is not trained.
bool is_narrow_weight(const at::Tensor& x, const at::Tensor& weight);

/// x W^T + b in the type of x. x [..., in], weight [out, in], bias [out] or undefined -> [..., out].
at::Tensor frozen_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// Whether the fused CPU kernels take x and this weight, narrow or not.
bool fusible_product(const at::Tensor& x, const at::Tensor& weight);

/// Writes x W^T into `out` [n, out], and dy W into `out` [n, in], for a weight of x's type or a narrow one. Of a narrow
/// one, such as a large output layer, only some rows are wide at a time.
/// REQUIRES: with a narrow weight `out`, x and dy are in fp32.
void product_out(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight);
void input_gradient_out(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& weight);

}  // namespace phalanx::kernels
