// Cross entropy of a language model's head whose vocabulary is split over the ranks of a tensor-parallel group. Each
// rank holds some rows of the output matrix, and computes only the logits of these ids.
//
//   const VocabShard part{.first = rank * rows, .count = vocab};
//   at::Tensor loss = vocab_parallel_cross_entropy(h, weight, labels, part, group);
//
// Contract
// - h [..., dim] and labels int64 [...] are the same on all ranks. So is the loss, an fp32 scalar: the sum over all
//   tokens whose label is not kIgnoredLabel, each times its token weight (the same on all ranks), divided by `divisor`;
//   unset: by their number. Each rank's gradient of h is an addend: h has the layout `shared` of
//   layout.h (convert() it first).
// - Collective in the forward pass: it gathers three floats per token and rank (the largest logit, the sum of their
//   exponentials, the label's logit). Nothing is sent in the backward pass.
// - As in kernels::linear_cross_entropy, logits exist for 512 tokens at a time (twice: one block is computed while the
//   other is summed) and become their gradient in place. The gradients of h and weight are computed in the forward
//   pass, so backward may run only once. Other labels must be in 0 .. count - 1: on the CPU another one is a DataError
//   on all ranks; on a device it makes the loss and the gradients NaN, as the host does not wait to look.
// - `low` is added to the logits: its x is the same on all ranks, its weight has this rank's rows. Each rank's gradient
//   of its x is an addend.
// - Any floating dtype and device. Exponentials are computed in fp32.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "phalanx/kernels/low_rank.h"

namespace phalanx {

class Communicator;

struct VocabShard {
  std::int64_t first = 0;  // the id of this rank's first row
  std::int64_t count = 0;  // ids of all ranks
};

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& labels,
                                        const VocabShard& part, const std::shared_ptr<Communicator>& group,
                                        std::optional<double> divisor = std::nullopt, double z_loss_weight = 0,
                                        const at::Tensor& token_weights = {}, const kernels::LowRank& low = {});

/// As kernels::linear_token_losses(), with the contract above. The same on all ranks; records no gradient.
at::Tensor vocab_parallel_token_losses(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& labels,
                                       const VocabShard& part, const std::shared_ptr<Communicator>& group,
                                       const kernels::LowRank& low = {});

}  // namespace phalanx
