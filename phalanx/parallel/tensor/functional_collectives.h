// Collectives that autograd sees: what the ranks of a group do with an activation, and, mirrored, with its gradient.
//
//   function              forward                               backward
//   copy_to_group         x as it is                            sum of the ranks' gradients
//   reduce_from_group        sum of the ranks' x                   the gradient as it is
//   gather_from_group          all parts, one after the other        this rank's part of the gradient
//   scatter_to_group            this rank's part of x                 all parts of the gradient
//   all_gather_along      all parts, one after the other        this rank's part of the sum of the gradients
//   reduce_scatter_along  this rank's part of the sum of x      all parts of the gradient
//
// Which one is right follows from what the ranks do with the result. Where each computes something else with it, its
// gradients are addends (copy_to_group, all_gather_along); where all compute the same, the gradients are equal already
// (reduce_from_group, gather_from_group). ActivationLayout (layout.h) says that in words and picks the function.
//
//   x = all_gather_along(x, /*dim=*/1, tp);        // [batch, seq / ranks, dim] -> [batch, seq, dim]
//   y = reduce_scatter_along(matmul(x, w), 1, tp); // back again
//
// Contract: collective, in the forward pass and once more in the backward pass, which must reach the same functions in
// the same order on every rank; the group's communicator is used by nothing else meanwhile. Any floating dtype (ids of
// integers pass as well, without gradients). `dim` may be negative. Every rank's part is equally long: Error, before
// anything is sent, where the ranks do not divide the dimension. Results are new tensors, except x itself from
// copy_to_group() and from a group of one. Backward of backward works.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace phalanx {

class Communicator;
class WeightGradientQueue;

/// `overlap_queue`: what the backward passes between here and the result left in that queue (key {}) is computed while the
/// gradient's collective is under way, so that weight gradients cost no time there.
using OverlapQueue = std::shared_ptr<WeightGradientQueue>;
at::Tensor copy_to_group(const at::Tensor& x, const std::shared_ptr<Communicator>& group,
                         const OverlapQueue& overlap_queue = nullptr);
at::Tensor reduce_from_group(const at::Tensor& x, const std::shared_ptr<Communicator>& group);
at::Tensor gather_from_group(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group);
at::Tensor scatter_to_group(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group);
at::Tensor all_gather_along(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group,
                            const OverlapQueue& overlap_queue = nullptr);
at::Tensor reduce_scatter_along(const at::Tensor& x, std::int64_t dim, const std::shared_ptr<Communicator>& group);

}  // namespace phalanx
