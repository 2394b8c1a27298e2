// Mean next-token cross entropy of a language model's head, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// mean over all tokens of -log softmax(x weight^T)[label]; x [..., dim], weight [vocab, dim], labels int64 [...].
/// A scalar in fp32. Every label counts and must lie in 0 .. vocab - 1 (a DataError names the first that does not).
///
/// On the CPU in fp32 the logits exist for 512 tokens at a time: their softmax becomes their gradient in place, and the
/// gradients of x and weight are computed in the forward pass and scaled in the backward one. So backward may run once.
/// The weight's lies in a buffer that is offered for it (tensor/weight_gradient.h) from the start, if that is free.
at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& labels);

/// The same from logits [..., vocab], by ATen ops.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels);

}  // namespace phalanx::kernels
