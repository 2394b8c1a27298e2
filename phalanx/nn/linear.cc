#include "phalanx/nn/linear.h"

#include <ATen/TensorOperators.h>

#include "phalanx/kernels/linear.h"

namespace phalanx::nn {

Linear::Linear(const LinearOptions& options, TensorOptionsOfModule tensor) : Module("Linear"), options_(options) {
  weight = make_parameter("weight", {options.out_features, options.in_features}, tensor);
  if (options.bias) bias = make_parameter("bias", {options.out_features}, tensor, Init::constant(0.0));
}

// What the exchange would multiply piece by piece is multiplied at once: a scale is of all rows.
at::Tensor Linear::forward_in_float8(const at::Tensor& x) const {
  at::Tensor y = kernels::float8_linear(gathers_ ? gathers_->gather(x) : x, used_weight(), float8_);
  if (scatters_) y = scatters_->scatter(y);
  const at::Tensor b = used_bias();
  return b.defined() ? y + b.to(y.scalar_type()) : y;
}

at::Tensor Linear::forward(const at::Tensor& x) {
  if (float8_) return forward_in_float8(x);
  const at::Tensor w = used_weight(), b = used_bias();
  if (!gathers_ && !scatters_) return kernels::linear(x, w, b);
  const at::Tensor y = gathers_ ? gathers_->all_gather_matmul(x, {w})[0] : scatters_->matmul_reduce_scatter(x, w);
  return b.defined() ? y + b : y;
}

}  // namespace phalanx::nn
