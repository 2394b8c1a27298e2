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
/// The same in another type: one cast if they are adjacent, otherwise one for each.
at::Tensor stacked_as(at::ScalarType type, const std::vector<at::Tensor>& weights);
/// Whether stacked() would be an alias.
bool are_adjacent(const std::vector<at::Tensor>& weights);
/// Moves the values of parameters [rows of each, in] into one storage, so that they are adjacent. Does nothing if they
/// are already, if one has no memory, or if they differ in dtype, device or `in`.
void make_adjacent(const std::vector<at::Tensor>& parameters);
/// Gives parameters adjacent memory, without values. Does nothing if one has memory, or if they differ so.
void allocate_adjacent(const std::vector<at::Tensor>& parameters);

/// For backward(): computes the gradients of trained weights that share the input x [rows, in]. dy [rows, rows of all
/// weights] has the columns of each. It is one product if the gradients may be written to adjacent memory, as
/// weight_gradients() makes it and buckets offer it. Returns what backward() returns for each weight.
std::vector<at::Tensor> stacked_weight_gradients(const at::Tensor& dy, const at::Tensor& x,
                                                 const std::vector<at::Tensor>& weights);

/// The same for gradients that are there: `made` [rows of all weights, in], in a type that may be another. Takes over
/// its memory where no buffers are offered.
std::vector<at::Tensor> deliver_stacked_gradients(const at::Tensor& made, const std::vector<at::Tensor>& weights);

}  // namespace phalanx::kernels
