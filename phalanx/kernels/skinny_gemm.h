// Products of few rows with a large matrix, and attention with one query per row: the operations of token-by-token
// decoding.
//
// Their speed is bound by reading the weights from memory. These kernels read the weights once and nothing else, while
// general-purpose libraries pack them first. fp32 on the CPU, in inference mode (a recomputed forward pass must have
// the bits of the first one).
//
// A row's result has the same bits whatever rows are computed with it, as long as they are few. So a sequence's tokens
// do not depend on its batch.
//
//   if (can_use_skinny_gemm(x, w)) y = skinny_gemm(x, w);      // [..., in] x [out, in] -> [..., out]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace phalanx::kernels {

/// Up to this many rows, skinny_gemm() is about as fast as the libraries' products or faster: 0.98 to 2 times at 16
/// rows, 1.1 to 3.7 times at 1 to 8 rows, on an AMD EPYC with AVX2 and libtorch's MKL (benchmarks/few_rows.cc; not
/// measured on others).
inline constexpr std::int64_t kSkinnyGemmRows = 16;

/// True for fp32 on the CPU in inference mode, no autocast, x of 1 to kSkinnyGemmRows rows and a contiguous weight.
bool can_use_skinny_gemm(const at::Tensor& x, const at::Tensor& weight);

/// x [..., in], weight [out, in] -> [..., out].
/// REQUIRES: can_use_skinny_gemm(x, weight).
at::Tensor skinny_gemm(const at::Tensor& x, const at::Tensor& weight);

/// Whether decode_attention() supports these: fp32 on the CPU, one query per row, contiguous heads.
bool can_use_decode_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values);

/// q is [batch, heads, 1, head_dim], keys and values are [batch, kv_heads, positions, head_dim]. Row r sees its first
/// seen[r] positions, and with window > 0 only the last `window` of these. Returns q's shape. `sinks`: fp32 [heads], of
/// attention_sinks.h; undefined: none.
at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            std::span<const std::int64_t> seen, std::int64_t window = 0, const at::Tensor& sinks = {});

}  // namespace phalanx::kernels
