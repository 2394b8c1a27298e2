// The two orders of attention's dimensions: that of scaled dot-product attention, and that of kernels that take
// sequences of unequal length one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace phalanx::kernels {

/// [batch, heads, seq, head_dim] -> [batch * seq, heads, head_dim]. An alias where the strides allow it.
inline at::Tensor as_tokens(const at::Tensor& t) { return t.transpose(1, 2).flatten(0, 1); }

/// [batch * seq, heads, head_dim] -> [batch, heads, seq, head_dim], an alias.
inline at::Tensor from_tokens(const at::Tensor& t, std::int64_t batch) {
  return t.unflatten(0, {batch, t.size(0) / batch}).transpose(1, 2);
}

}  // namespace phalanx::kernels
