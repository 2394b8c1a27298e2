// Attention of one new token a row over the keys and values of a cache, on a GPU in 16 bits: ATen's flash attention.
// Its kernels do not depend on how many keys there are. cuDNN's, which at::scaled_dot_product_attention prefers, are
// made anew for each number of keys, and a text gets longer by one in every step.
//
//   if (can_use_cached_attention(q, keys, values)) y = cached_attention(q, keys, values, lengths, window);
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace phalanx::kernels {

/// Rows of a cache that hold different numbers of tokens. Each tensor is int32, on the device, contiguous.
struct CachedLengths {
  at::Tensor seen;         // [rows]: how many keys the row's token sees
  at::Tensor first_keys;   // [rows + 1]: r * max_len, where each row's keys begin if rows lie one behind the other
  at::Tensor first_query;  // [rows + 1]: r
};

/// Whether these may be passed: one token a row, 16 bits, not on the CPU, a head size that the kernel takes.
bool can_use_cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values);

/// q [rows, heads, 1, head_dim]; keys and values [rows, kv_heads, positions, head_dim], whose memory is
/// [rows, max_len, kv_heads, head_dim]. `lengths` null: all rows see all positions. With window > 0 a row sees its last
/// `window` only. `sinks`: [heads], of attention_sinks.h; undefined: none. Returns q's shape. Not differentiable.
/// The host waits for nothing.
at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            const CachedLengths* lengths, std::int64_t window, const at::Tensor& sinks = {});

}  // namespace phalanx::kernels
