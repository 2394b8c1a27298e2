// x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 whatever the dtype of x.
#pragma once

#include <cstdint>

#include "phalanx/kernels/rms_norm.h"
#include "phalanx/nn/norm.h"

namespace phalanx::nn {

class RMSNorm : public Norm {
 public:
  explicit RMSNorm(std::int64_t dim, double eps = 1e-5, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x) override;  // [..., dim]

  /// x + delta, or x if delta is undefined, and the norm of that.
  kernels::ResidualNorm add(const at::Tensor& x, const at::Tensor& delta);
};

}  // namespace phalanx::nn
