// The SwiGLU feed-forwards of many experts as grouped products: one call for all experts, on a device.
//
// Rows are sorted by expert. Where each expert's rows end is read on the device, so the host need not know how many
// rows an expert has, and does not wait for it.
//
//   const at::Tensor ends = at::cumsum(counts, 0).to(at::kInt);                    // [experts]
//   if (can_group_experts(rows, weights)) y = grouped_feed_forward(rows, ends, weights);
//
// The products are ATen's (at::_grouped_mm). On CUDA they are one kernel on GPUs of compute capability 9. On others
// ATen would multiply in a loop, for which the host waits, so they are not used there.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace phalanx::kernels {

/// Of each expert: w1 and w3 [hidden, dim], w2 [dim, hidden].
struct ExpertWeights {
  std::vector<at::Tensor> w1, w2, w3;
  /// w1 and w3 of the first expert, of the second, ...: the order in which they have to be adjacent.
  std::vector<at::Tensor> gates_and_ups() const;
};

/// Whether grouped_feed_forward() takes them: bfloat16 products, here or by autocast, on a device that has grouped
/// ones; weights of one type that are adjacent (fused_linear.h), w2 in the order of experts, and all trained or none;
/// dimensions that are multiples of 8. Their gradients are never deferred.
bool can_group_experts(const at::Tensor& rows, const ExpertWeights& weights);

/// w2_e (silu(w1_e x) * w3_e x) for the rows [n, dim] of each expert e, differentiable. `ends`: int32 [experts] on the
/// device, where the rows of each end. From the last one on, rows give zeros; `covers_all`: there are none. Gradients
/// of weights are rounded to bfloat16 before they are added to buffers of another type.
/// REQUIRES: can_group_experts(); ends do not fall, and are at most n.
at::Tensor grouped_feed_forward(const at::Tensor& rows, const at::Tensor& ends, const ExpertWeights& weights,
                                bool covers_all);

}  // namespace phalanx::kernels
