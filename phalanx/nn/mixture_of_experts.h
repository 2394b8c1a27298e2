// A mixture of experts: each token goes through few of many feed-forward nets, and their weighted results are summed.
//
//   p = softmax(gate x)                      over all experts, in fp32
//   y = sum over the k experts e of the largest p:  p_e / (sum of these k) * expert_e(x)
//
// This is Mixtral's formula. Every rank has all experts (or its rows and columns of each). In training every expert
// runs, even with no token. So all parameters get a gradient in every step and on every rank, zeros if no token came:
// DistributedDataParallel and FullyShardedDataParallel wait for all gradients. In inference mode an expert without
// tokens is skipped.
//
// There is no auxiliary loss to balance the experts' load.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "phalanx/nn/feed_forward.h"

namespace phalanx::nn {

struct MixtureOptions {
  std::int64_t dim = 0;
  std::int64_t hidden = 0;             // of each expert
  std::int64_t experts = 0;            // 1 or more
  std::int64_t experts_per_token = 0;  // 1 to experts
};

class MixtureOfExperts : public Positionwise {
 public:
  explicit MixtureOfExperts(const MixtureOptions& options, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x) override;  // [..., dim] -> [..., dim]
  std::vector<Linear*> last_projections() const override;

  const MixtureOptions& options() const noexcept { return options_; }

  std::shared_ptr<Linear> gate;  // [experts, dim]
  std::vector<std::shared_ptr<FeedForward>> experts;

 private:
  MixtureOptions options_;
};

}  // namespace phalanx::nn
