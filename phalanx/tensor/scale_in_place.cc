#include "phalanx/tensor/scale_in_place.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

namespace phalanx {
namespace {

// With a dimension, as an operand has to have that is not converted to x's type.
at::Tensor wide_factor(const at::Tensor& x, const at::Tensor& factor) {
  const at::Tensor wide = factor.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  return x.dim() == 0 ? wide.reshape({}) : wide.reshape({1});
}

}  // namespace

void scale_in_place(const at::Tensor& x, const at::Tensor& factor) { x.mul_(wide_factor(x, factor)); }

void scale_in_place(const at::Tensor& x, double factor) { x.mul_(at::scalar_tensor(factor, at::kDouble)); }

at::Tensor scaled(const at::Tensor& x, const at::Tensor& factor) {
  at::Tensor product = at::empty_like(x);
  return at::mul_out(product, x, wide_factor(x, factor));
}

}  // namespace phalanx
