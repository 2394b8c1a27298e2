// Mean next-token cross entropy of a language model's head, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "phalanx/base/ignored_label.h"
#include "phalanx/kernels/low_rank.h"

namespace phalanx::kernels {

/// The sum of -log softmax(x weight^T)[label] over all tokens whose label is not kIgnoredLabel, divided by `divisor`;
/// unset: by their number, so that it is the mean. The z-loss adds z_loss_weight * log(sum(exp(x weight^T)))^2 of
/// each of these tokens to the sum: it keeps logits from drifting. x is [..., dim], weight [vocab, dim], labels
/// int64 [...]. Returns an fp32 scalar. Other labels must be in 0 .. vocab - 1 (a DataError names the first that is
/// not). The mean of no label is NaN; with a divisor, no label gives a loss of 0 and gradients of 0.
/// `token_weights`, fp32 [...], multiplies what each token adds to the sum; they may be negative, and have no
/// gradient. Undefined: 1. `low` is added to the logits.
///
/// On the CPU in fp32 the logits exist for 512 tokens at a time: their softmax becomes their gradient in place. The
/// gradients of x and weight are computed in the forward pass and scaled in the backward pass. So backward may run only
/// once. If the buffer offered for the weight's gradient (tensor/weight_gradient.h) is free, the gradient is computed
/// there from the start.
///
/// On a GPU likewise, with products in x's dtype or autocast's, and as many rows of logits at a time as fill it. There
/// a label outside the vocabulary makes the loss and all gradients NaN, as the host does not wait to look. Throws Error
/// if labels are not int64 on x's device, one for each row.
at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& labels,
                                std::optional<double> divisor = std::nullopt, double z_loss_weight = 0,
                                const at::Tensor& token_weights = {}, const LowRank& low = {});

/// -log softmax(x weight^T)[label] of each token, fp32 [...], 0 for kIgnoredLabel. Logits exist for as few tokens at a
/// time, and have the same bits. Records no gradient.
at::Tensor linear_token_losses(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& labels,
                               const LowRank& low = {});

/// As linear_cross_entropy(), from logits [..., vocab], by ATen ops.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                         std::optional<double> divisor = std::nullopt, double z_loss_weight = 0,
                         const at::Tensor& token_weights = {});

/// As linear_token_losses(), from logits, and with a gradient.
at::Tensor token_losses(const at::Tensor& logits, const at::Tensor& labels);

/// Token weights as shares of the largest, and the largest absolute value, 0-dim; 1 if all are 0. Gradients of 16 bits
/// are computed with the shares, since small weights would be lost in them, and multiplied by `largest` later. The host
/// does not wait.
struct WeightShares {
  at::Tensor shares, largest;
};
WeightShares shares_of_largest(const at::Tensor& token_weights);

/// Throws Error unless the divisor is unset or positive.
void require_divisor(std::optional<double> divisor);

/// How many labels, contiguous int64 on the CPU, are counted.
std::int64_t counted_labels(const at::Tensor& labels);

/// Throws a DataError that names the first of the labels, contiguous int64 on the CPU,
/// that is neither kIgnoredLabel nor in 0 .. vocab - 1.
void check_labels(const at::Tensor& labels, std::int64_t vocab);

}  // namespace phalanx::kernels
