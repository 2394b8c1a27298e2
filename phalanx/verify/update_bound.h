// How far two sides' weights may come apart in one update that begins at the same weights, given how far apart the
// gradients were: nothing where those had the same bits.
//
// AdamW moves a weight by lr m / (sqrt(v) + eps), whatever the size of its gradient. m and sqrt(v) are a mean and a
// root of a mean of squares of the gradients so far; where these differ by d, element by element,
//
//   |m / sqrt(v) - m' / sqrt(v')| <= |m - m'| / sqrt(v) + |sqrt(v) - sqrt(v')| / sqrt(v) <= 2 rms(d) / rms(g)
//
// and never more than 2, as no side moves by more than lr. So an element whose gradient is as small as the rounding of
// it may go the other way, and one whose gradient is large moves alike. SGD moves a weight by lr times the gradient, or
// its running sum with momentum, so the bound is the same sum of differences. Clipping multiplies gradients by a number
// that is off by as much as the norm is.
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

namespace phalanx::train {

class UpdateBound {
 public:
  explicit UpdateBound(TrainConfig::Optimizer optimizer) : optimizer_(std::move(optimizer)) {}

  void add(const std::string& name, const at::Tensor& found, const at::Tensor& expected);
  struct Norms {
    double found = 0, expected = 0;
    double factor = 1;  // what the optimizer takes gradients times: clipping, and the loss's scale
  };
  void end_step(const Norms& norms);
  /// The 2-norm of what the weights may differ by after the update of the step that has ended; rounding of the weights
  /// themselves comes on top. 0 of a name that no gradient was added of.
  double of(const std::string& name, double lr) const;

 private:
  // By element. AdamW: sums of squares over the steps. SGD: running sums.
  struct Sums {
    at::Tensor difference, found, expected;
    at::Tensor found_now, expected_now;  // gradients of the step under way
  };
  bool is_sgd() const { return optimizer_.name == "SGD"; }

  TrainConfig::Optimizer optimizer_;
  std::map<std::string, Sums> sums_;
  double norm_difference_ = 0;  // relative, the largest so far
};

}  // namespace phalanx::train
