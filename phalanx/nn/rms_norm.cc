#include "phalanx/nn/rms_norm.h"

#include "phalanx/kernels/rms_norm.h"

namespace phalanx::nn {

RMSNorm::RMSNorm(std::int64_t dim, double eps, TensorOptionsOfModule tensor) : Norm("RMSNorm", dim, eps, tensor) {}

at::Tensor RMSNorm::forward(const at::Tensor& x) { return kernels::rms_norm(x, used("weight", weight), eps()); }

kernels::ResidualNorm RMSNorm::add(const at::Tensor& x, const at::Tensor& delta) {
  return kernels::add_rms_norm(x, delta, used("weight", weight), eps());
}

}  // namespace phalanx::nn
