// Bounds how far the weights of two sides may diverge in one update that begins at the same weights, given how far
// apart the gradients were. The bound is zero if the gradients had the same bits.
//
// AdamW moves a weight by lr m / (sqrt(v) + eps), whatever the size of its gradient. m is a mean of the gradients so
// far, and sqrt(v) the root of a mean of their squares. If these gradients differ by d, element by element,
//
//   |m / sqrt(v) - m' / sqrt(v')| <= |m - m'| / sqrt(v) + |sqrt(v) - sqrt(v')| / sqrt(v) <= 2 rms(d) / rms(g)
//
// and never more than 2, because no side moves by more than lr. So an element whose gradient is as small as its
// rounding error may move the other way, and an element whose gradient is large moves alike. SGD moves a weight by lr
// times the gradient, or with momentum by lr times its running sum. So its bound is the same sum of the differences.
// Clipping multiplies gradients by a factor whose relative error is that of the norm.
//
//   UpdateBound bound(config.optimizer);
//   bound.add("output.weight", found, expected);        // gradients of this step, of one shape
//   bound.end_step({.found = norm, .expected = other_norm, .factor = clip / loss_scale});
//   bound.of("output.weight", lr);                      // 2-norm
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "phalanx/config/config.h"

namespace phalanx::verify {

class UpdateBound {
 public:
  explicit UpdateBound(config::TrainConfig::Optimizer optimizer) : optimizer_(std::move(optimizer)) {}

  void add(const std::string& name, const at::Tensor& found, const at::Tensor& expected);
  struct Norms {
    double found = 0, expected = 0;
    double factor = 1;  // the optimizer multiplies gradients by it: clipping, and the loss scale
  };
  void end_step(const Norms& norms);
  /// The largest 2-norm of the weights' difference after the update of the step that has ended. Rounding of the weights
  /// themselves is not included. 0 for a name without gradients.
  double of(const std::string& name, double lr) const;

 private:
  // By element. AdamW: sums of squares over the steps. SGD: running sums.
  struct Sums {
    at::Tensor difference, found, expected;
    at::Tensor found_now, expected_now;  // gradients of the current step
  };
  bool is_sgd() const { return optimizer_.name == "SGD"; }

  config::TrainConfig::Optimizer optimizer_;
  std::map<std::string, Sums> sums_;
  double norm_difference_ = 0;  // relative, the largest so far
};

}  // namespace phalanx::verify
