// A net that works on each position separately, the second half of a transformer layer: FeedForward (SwiGLU), Mlp
// (GELU) or MixtureOfExperts.
#pragma once

#include <vector>

#include "phalanx/nn/linear.h"

namespace phalanx::nn {

class Positionwise : public Module {
 public:
  using Module::Module;
  virtual at::Tensor forward(const at::Tensor& x) = 0;  // [..., dim] -> [..., dim]

  /// The layers whose products are added to the residual stream.
  virtual std::vector<Linear*> last_projections() const = 0;
};

}  // namespace phalanx::nn
