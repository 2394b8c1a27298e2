// x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 whatever the dtype of x.
#pragma once

#include <cstdint>

#include "phalanx/nn/norm.h"

namespace phalanx::nn {

class RMSNorm : public Norm {
 public:
  explicit RMSNorm(std::int64_t dim, double eps = 1e-5, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x) override;  // [..., dim]
};

}  // namespace phalanx::nn
