// Causal attention of a checkpointed layer on a device, whose result is saved (saved_activations.h): the second run
// takes over the result and the log-sum-exps, and does not attend again. The kernels are those that ATen would choose
// for at::scaled_dot_product_attention, so the bits are the same.
//
//   if (const auto kernel = savable_attention(q, k, v)) y = saved_attention(*kernel, q, k, v);
#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::kernels {

/// The kernel that trains q [batch, heads, seq, head_dim] with k and v [batch, kv_heads, seq, head_dim], if the calling
/// thread runs a layer that saves activations, and it is flash or cuDNN attention. Memory-efficient attention, of
/// float32, is recomputed.
std::optional<at::SDPBackend> savable_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

/// Causal attention, differentiable; returns q's shape. REQUIRES: `kernel` is what savable_attention() returned.
at::Tensor saved_attention(at::SDPBackend kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

/// Flash attention over documents, differentiable. q is [tokens, heads, head_dim], k and v are [tokens, kv_heads,
/// head_dim]. `window` 0: none. Outside such a layer its result is not saved. Returns q's shape.
at::Tensor saved_flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window,
                                 const DocumentBoundaries& documents);

}  // namespace phalanx::kernels
