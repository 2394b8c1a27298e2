// Causal attention on a GPU over documents of various lengths in one kernel, differentiable.
//
//   if (can_use_variable_lengths(q, is_windowed)) y = variable_length_attention(q, k, v, window, documents);
//
// In 16 bits, under autocast in its dtype: ATen's flash attention, by cumulative lengths. In fp32: its memory-efficient
// attention. Neither holds a mask, and the host waits for nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::kernels {

/// Whether such a kernel exists for q's device, type and head size.
/// Memory-efficient attention is not used with windows.
bool can_use_variable_lengths(const at::Tensor& q, bool is_windowed);

/// As causal_attention(). `window` 0: none. REQUIRES: can_use_variable_lengths().
at::Tensor variable_length_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window,
                                     const DocumentBoundaries& documents);

}  // namespace phalanx::kernels
