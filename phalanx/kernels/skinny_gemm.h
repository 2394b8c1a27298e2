// Products of few rows with a large matrix, and attention of one query a row: what decoding token by token is made of.
// They wait for the weights to come from memory, so these read them once and nothing else; libraries' general products
// pack them first. fp32 on the CPU, in inference mode (a recomputed forward pass must have the bits of the first one).
//
// A row's result has the same bits whatever rows are beside it, as long as there are few, so that a sequence's tokens
// do not depend on its batch.
//
//   if (can_use_skinny_gemm(x, w)) y = skinny_gemm(x, w);      // [..., in] x [out, in] -> [..., out]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace phalanx::kernels {

/// Rows up to which this is about as fast as the libraries' products or faster: at 16 rows 0.98 to 2 times, at 1 to
/// 8 1.1 to 3.7, on an AMD EPYC with AVX2 and libtorch's MKL (benchmarks/few_rows.cc; not measured on others).
inline constexpr std::int64_t kSkinnyGemmRows = 16;

/// True for fp32 on the CPU in inference mode, no autocast, x of 1 to kSkinnyGemmRows rows and a contiguous weight.
bool can_use_skinny_gemm(const at::Tensor& x, const at::Tensor& weight);

/// x [..., in], weight [out, in] -> [..., out], of what can_use_skinny_gemm().
at::Tensor skinny_gemm(const at::Tensor& x, const at::Tensor& weight);

/// True where decode_attention() takes these: fp32 on the CPU, one query a row, contiguous heads.
bool can_use_decode_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values);

/// q [batch, heads, 1, head_dim]; keys and values [batch, kv_heads, positions, head_dim], of which row r sees its first
/// seen[r], and of these with window > 0 the last `window` only. Returns q's shape.
at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            std::span<const std::int64_t> seen, std::int64_t window = 0);

}  // namespace phalanx::kernels
