#include "phalanx/verify/update_bound.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace phalanx::verify {
namespace {

double l2_norm(const at::Tensor& x) { return x.norm().item<double>(); }

}  // namespace

void UpdateBound::add(const std::string& name, const at::Tensor& found, const at::Tensor& expected) {
  Sums& sums = sums_[name];
  sums.found_now = found.detach().to(at::kCPU, at::kDouble);
  sums.expected_now = expected.detach().to(at::kCPU, at::kDouble);
}

void UpdateBound::end_step(const Norms& norms) {
  const double smallest = std::numeric_limits<double>::min();
  const double off = std::abs(norms.found - norms.expected) / std::max(std::abs(norms.expected), smallest);
  norm_difference_ = std::max(norm_difference_, off);
  for (auto& [name, sums] : sums_) {
    const at::Tensor found = std::exchange(sums.found_now, at::Tensor()) * norms.factor;
    const at::Tensor expected = std::exchange(sums.expected_now, at::Tensor()) * norms.factor;
    if (!sums.difference.defined()) {
      for (at::Tensor* one : {&sums.difference, &sums.found, &sums.expected}) *one = at::zeros_like(found);
    }
    if (is_sgd()) {
      sums.difference.mul_(optimizer_.momentum).add_((found - expected).abs());
      sums.expected.mul_(optimizer_.momentum).add_(expected.abs());
      continue;
    }
    sums.difference.add_((found - expected).square());
    sums.found.add_(found.square());
    sums.expected.add_(expected.square());
  }
}

double UpdateBound::of(const std::string& name, double lr) const {
  const auto found = sums_.find(name);
  if (found == sums_.end()) return 0;
  const Sums& sums = found->second;
  if (is_sgd()) return lr * (l2_norm(sums.difference) + norm_difference_ * l2_norm(sums.expected));
  // 0 / 0: neither side has a gradient, so neither moves.
  const at::Tensor ratio = (sums.difference / at::minimum(sums.found, sums.expected)).sqrt_().nan_to_num_(0);
  const double by_element = l2_norm(ratio.mul_(2).clamp_max_(2));
  return lr * (by_element + 2 * norm_difference_ * std::sqrt(static_cast<double>(ratio.numel())));
}

}  // namespace phalanx::verify
