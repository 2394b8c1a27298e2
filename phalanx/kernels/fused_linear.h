// y = x [W_1; W_2; ...]^T: several weights of one input as one product, any device and dtype.
//
//   fused_linear(x, {wq, wk, wv})          // [..., rows of all]
//
// Weights that lie one after the other in one storage are multiplied as they lie; others are put together first, which
// costs as much as reading them once. Each weight gets a gradient of its own, as linear.h puts it where it is wanted.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace phalanx::kernels {

/// x [..., in], weights [rows of each, in] -> [..., sum of rows].
at::Tensor fused_linear(const at::Tensor& x, const std::vector<at::Tensor>& weights);

/// One after the other: an alias where they lie so, else a copy. No autograd.
at::Tensor stacked(const std::vector<at::Tensor>& weights);
/// Whether stacked() would be an alias.
bool are_adjacent(const std::vector<at::Tensor>& weights);

}  // namespace phalanx::kernels
