#include "phalanx/nn/linear.h"

#include <ATen/TensorOperators.h>

#include "phalanx/kernels/linear.h"

namespace phalanx::nn {

Linear::Linear(const LinearOptions& options, TensorOptionsOfModule tensor) : Module("Linear"), options_(options) {
  weight = make_parameter("weight", {options.out_features, options.in_features}, tensor);
  if (options.bias) bias = make_parameter("bias", {options.out_features}, tensor, Init::constant(0.0));
}

at::Tensor Linear::forward(const at::Tensor& x) {
  const at::Tensor w = used_weight(), b = used_bias();
  if (!gathers_ && !scatters_) return kernels::linear(x, w, b);
  const at::Tensor y = gathers_ ? gathers_->all_gather_matmul(x, {w})[0] : scatters_->matmul_reduce_scatter(x, w);
  return b.defined() ? y + b : y;
}

}  // namespace phalanx::nn
