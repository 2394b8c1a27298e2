#include "phalanx/nn/linear.h"

#include "phalanx/kernels/linear.h"

namespace phalanx::nn {

Linear::Linear(const LinearOptions& options, TensorOptionsOfModule tensor) : Module("Linear"), options_(options) {
  weight = make_parameter("weight", {options.out_features, options.in_features}, tensor);
  if (options.bias) bias = make_parameter("bias", {options.out_features}, tensor, Init::constant(0.0));
}

at::Tensor Linear::forward(const at::Tensor& x) {
  return kernels::linear(x, used("weight", weight), used("bias", bias));
}

}  // namespace phalanx::nn
