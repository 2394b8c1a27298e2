// The feed-forward net of GPT-2: w2 gelu(w1 x + b1) + b2, with the tanh form of GELU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "phalanx/nn/positionwise.h"

namespace phalanx::nn {

class Mlp : public Positionwise {
 public:
  Mlp(std::int64_t dim, std::int64_t hidden, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x) override;  // [..., dim] -> [..., dim]
  std::vector<Linear*> last_projections() const override { return {w2.get()}; }

  std::shared_ptr<Linear> w1, w2;  // up, down
};

}  // namespace phalanx::nn
