#include "phalanx/nn/rms_norm.h"

#include "phalanx/kernels/rms_norm.h"

namespace phalanx::nn {

RMSNorm::RMSNorm(std::int64_t dim, double eps, TensorOptionsOfModule tensor) : Module("RMSNorm"), eps_(eps) {
  weight = make_parameter("weight", {dim}, tensor, Init::constant(1.0));
}

at::Tensor RMSNorm::forward(const at::Tensor& x) { return kernels::rms_norm(x, used("weight", weight), eps_); }

}  // namespace phalanx::nn
