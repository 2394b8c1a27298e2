// y = x [W_1; W_2; ...]^T: several weights that share one input, as one product. Any device and dtype.
//
//   fused_linear(x, {wq, wk, wv})          // [..., rows of all]
//
// Weights that are adjacent in one storage are multiplied in place. Others are concatenated first, which costs as much
// as reading them once. Each weight gets its own gradient, where linear.h would put it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace phalanx::kernels {

/// x [..., in], weights [rows of each, in] -> [..., sum of rows].
at::Tensor fused_linear(const at::Tensor& x, const std::vector<at::Tensor>& weights);

/// The weights concatenated: an alias if they are adjacent, otherwise a copy. No autograd.
at::Tensor stacked(const std::vector<at::Tensor>& weights);
/// Whether stacked() would be an alias.
bool are_adjacent(const std::vector<at::Tensor>& weights);

}  // namespace phalanx::kernels
