// Differentiable collectives: what the ranks of a group do with an activation and, mirrored, with its gradient.
//
//   function              forward                               backward
//   copy_to_group         x unchanged                           sum of the ranks' gradients
//   reduce_from_group     sum of the ranks' x                   the gradient unchanged
//   gather_from_group     concatenation of all parts            this rank's part of the gradient
//   scatter_to_group      this rank's part of x                 concatenation of all parts of the gradient
//   all_gather_along      concatenation of all parts            this rank's part of the sum of the gradients
//   reduce_scatter_along  this rank's part of the sum of x      concatenation of all parts of the gradient
//   all_to_all_rows       rows of x to the ranks they are for   rows of the gradient back
//
// The right function depends on what the ranks do with the result. If each computes something different with it, the
// gradients are addends (copy_to_group, all_gather_along). If all compute the same, the gradients are already equal
// (reduce_from_group, gather_from_group). ActivationLayout (layout.h) names these cases and picks the function.
//
//   x = all_gather_along(x, /*dim=*/1, tp);        // [batch, seq / ranks, dim] -> [batch, seq, dim]
//   y = reduce_scatter_along(matmul(x, w), 1, tp); // back again
//
// Contract
// - Collective, in the forward pass and again in the backward pass. The backward pass must reach the same functions in
//   the same order on every rank. Nothing else uses the group's communicator meanwhile.
// - Any floating dtype. Integer ids pass as well, without gradients.
// - `dim` may be negative. All ranks' parts have equal length: throws Error, before anything is sent, if the number of
//   ranks does not divide the dimension.
// - Results are new tensors, except that copy_to_group() and a group of one rank return x itself.
// - Double backward works.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace phalanx {

class Communicator;
class WeightGradientQueue;

/// `overlap_queue`: while the gradient's collective is in flight, the backward pass computes the weight gradients that
/// the backward passes between here and the result left in that queue (key {}). So weight gradients take no extra time
/// there.
using OverlapQueue = std::shared_ptr<WeightGradientQueue>;
at::Tensor copy_to_group(const at::Tensor& x, const std::shared_ptr<Communicator>& group,
                         const OverlapQueue& overlap_queue = nullptr);
at::Tensor reduce_from_group(const at::Tensor& x, const std::shared_ptr<Communicator>& group);
at::Tensor gather_from_group(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group);
at::Tensor scatter_to_group(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group);
at::Tensor all_gather_along(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group,
                            const OverlapQueue& overlap_queue = nullptr);
at::Tensor reduce_scatter_along(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group);
/// [sum of `sent`, ...] -> [sum of `received`, ...]: the first sent[0] rows of x go to rank 0, the next sent[1] to rank
/// 1, and so on; the result has the rows of rank 0 first. Counts may be 0.
/// REQUIRES: received[i] is what rank i sends to this one.
at::Tensor all_to_all_rows(const at::Tensor& x, const std::vector<std::int64_t>& sent,
                           const std::vector<std::int64_t>& received, const std::shared_ptr<Communicator>& group);

}  // namespace phalanx
