// x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 whatever the dtype of x. Or, as Gemma
// has it, times 1 + weight.
//
// The last dimension may be split over ranks, each with its part of x and of the weight.
// set_group_mean() then makes the mean that of all parts.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "phalanx/kernels/rms_norm.h"
#include "phalanx/nn/norm.h"

namespace phalanx::nn {

class RMSNorm : public Norm {
 public:
  explicit RMSNorm(std::int64_t dim, double eps = 1e-5, TensorOptionsOfModule tensor = {}, bool adds_one = false);

  at::Tensor forward(const at::Tensor& x) override;  // [..., dim]

  /// x + delta, or x if delta is undefined, and the norm of that.
  kernels::ResidualNorm add(const at::Tensor& x, const at::Tensor& delta);

  /// Maps the mean of x^2 over this rank's part, [..., 1] in fp32, to that over all ranks' parts, differentiably.
  using GroupMean = std::function<at::Tensor(const at::Tensor& mean)>;
  void set_group_mean(GroupMean mean) { group_mean_ = std::move(mean); }

 private:
  at::Tensor factor(const at::Tensor& x) const;  // that the normalised x is multiplied by

  bool adds_one_;
  GroupMean group_mean_;
};

}  // namespace phalanx::nn
