#include "phalanx/nn/layer_norm.h"

#include <ATen/ops/layer_norm.h>

namespace phalanx::nn {

LayerNorm::LayerNorm(std::int64_t dim, double eps, TensorOptionsOfModule tensor) : Norm("LayerNorm", dim, eps, tensor) {
  bias = make_parameter("bias", {dim}, tensor, Init::constant(0.0));
}

at::Tensor LayerNorm::forward(const at::Tensor& x) {
  // On the CPU, ATen sums the gradients of weight and bias in x's type.
  if (x.device().is_cpu() && x.itemsize() == 2) return forward(x.to(at::kFloat)).to(x.scalar_type());
  // What is stored in 16 bits is widened for x in fp32.
  const auto widened = [&](const at::Tensor& w) { return x.scalar_type() == at::kFloat ? w.to(at::kFloat) : w; };
  return at::layer_norm(x, {x.size(-1)}, widened(used("weight", weight)), widened(used("bias", bias)), eps());
}

}  // namespace phalanx::nn
