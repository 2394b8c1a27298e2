// (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension. The variance divides by the number
// of elements.
#pragma once

#include <cstdint>

#include "phalanx/nn/norm.h"

namespace phalanx::nn {

class LayerNorm : public Norm {
 public:
  explicit LayerNorm(std::int64_t dim, double eps = 1e-5, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x) override;  // [..., dim]

  at::Tensor bias;  // [dim], starts as zeros
};

}  // namespace phalanx::nn
