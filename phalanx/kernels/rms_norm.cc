#include "phalanx/kernels/rms_norm.h"

#include <ATen/TensorOperators.h>

namespace phalanx::kernels {

at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor h = x.to(at::kFloat);
  return (h * (h * h).mean(-1, /*keepdim=*/true).add(eps).rsqrt()).to(x.scalar_type()) * weight;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return rms_norm_reference(x, weight, eps);
}

}  // namespace phalanx::kernels
