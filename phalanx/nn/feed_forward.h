// Gated feed-forward: w2 (silu(w1 x) * w3 x), SwiGLU, or with the tanh form of GELU in place of silu, or with limits
// (kernels/clamped_swiglu.h). Its projections may have biases.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "phalanx/models/config/layer_forms.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/positionwise.h"

namespace phalanx::nn {

struct FeedForwardOptions {
  GatedActivation activation = GatedActivation::silu;
  double limit = 0.0;  // of clamped_silu
  bool bias = false;   // of all three projections
};

class FeedForward : public Positionwise {
 public:
  FeedForward(std::int64_t dim, std::int64_t hidden, TensorOptionsOfModule tensor = {},
              const FeedForwardOptions& options = {});

  /// On a device the weights of gate and up become adjacent: they are one product.
  std::vector<std::vector<at::Tensor>> one_products() const override;
  /// Whether a call is kernels::swiglu_feed_forward() with the weights of w1, w2 and w3 and nothing else.
  bool is_plain_swiglu() const;
  at::Tensor forward(const at::Tensor& x) override;  // [..., dim] -> [..., dim]
  std::vector<Linear*> last_projections() const override { return {w2.get()}; }

  /// From now on x and the result are this rank's rows, and the projections exchange rows through it.
  void set_collective_matmul(std::shared_ptr<const CollectiveMatmul> exchange) {
    collective_matmul_ = std::move(exchange);
  }

  std::shared_ptr<Linear> w1, w2, w3;  // gate, down, up

 private:
  bool calls_its_layers() const;
  at::Tensor forward_layer_by_layer(const at::Tensor& x);
  at::Tensor gated(const at::Tensor& gate, const at::Tensor& up) const;

  FeedForwardOptions options_;
  std::shared_ptr<const CollectiveMatmul> collective_matmul_;
};

}  // namespace phalanx::nn
