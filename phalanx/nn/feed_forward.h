// SwiGLU feed-forward: w2 (silu(w1 x) * w3 x).
#pragma once

#include <cstdint>
#include <memory>

#include "phalanx/nn/linear.h"

namespace phalanx::nn {

class FeedForward : public Module {
 public:
  FeedForward(std::int64_t dim, std::int64_t hidden, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x);  // [..., dim] -> [..., dim]

  std::shared_ptr<Linear> w1, w2, w3;  // gate, down, up
};

}  // namespace phalanx::nn
