#include "phalanx/kernels/cached_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/sigmoid.h>

#include <optional>

namespace phalanx::kernels {
namespace {

/// The cache's memory as tokens of all rows: [rows * max_len, kv_heads, head_dim].
at::Tensor all_tokens(const at::Tensor& cached) {
  const std::int64_t rows = cached.size(0), heads = cached.size(1), max_len = cached.stride(0) / cached.stride(2);
  return cached.as_strided({rows * max_len, heads, cached.size(3)}, {cached.stride(2), cached.stride(1), 1});
}

}  // namespace

bool can_use_cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values) {
  const bool is_16_bits = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  const auto fits = [&](const at::Tensor& t) {
    return t.scalar_type() == q.scalar_type() && t.stride(3) == 1 && t.stride(1) == t.size(3) &&
           t.stride(2) == t.size(1) * t.size(3) && t.stride(0) % t.stride(2) == 0;
  };
  return !q.device().is_cpu() && is_16_bits && q.size(2) == 1 && q.numel() > 0 && q.size(3) % 8 == 0 &&
         q.size(3) <= 256 && fits(keys) && fits(values);
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            const CachedLengths* lengths, std::int64_t window, const at::Tensor& sinks) {
  std::optional<std::int64_t> before, after;
  if (window > 0 && window < keys.size(2)) {
    before = window - 1;
    after = 0;
  }
  const auto attend = [&](const at::Tensor& queries, const at::Tensor& k, const at::Tensor& v) -> at::Tensor {
    const auto of = [&](at::Tensor CachedLengths::*one) {
      return lengths == nullptr ? std::optional<at::Tensor>() : std::optional(lengths->*one);
    };
    const auto results = at::_flash_attention_forward(
        queries, k, v, of(&CachedLengths::first_query), of(&CachedLengths::first_keys),
        /*max_q=*/1, keys.size(2), /*dropout_p=*/0.0, /*is_causal=*/false,
        /*return_debug_mask=*/false, /*scale=*/std::nullopt, before, after, of(&CachedLengths::seen));
    const at::Tensor& y = std::get<0>(results);
    if (!sinks.defined()) return y;
    // Log-sum-exps are [rows, heads, 1], and with lengths [heads, rows].
    const at::Tensor log_sums = lengths == nullptr ? std::get<1>(results).squeeze(2) : std::get<1>(results).t();
    const at::Tensor share = at::sigmoid(log_sums - sinks.to(log_sums.scalar_type())).unsqueeze(-1);  // of the keys
    return (y * (lengths == nullptr ? share.unsqueeze(1) : share)).to(y.scalar_type());
  };
  const at::Tensor queries = q.transpose(1, 2);  // [rows, 1, heads, head_dim]
  if (lengths == nullptr) return attend(queries, keys.transpose(1, 2), values.transpose(1, 2)).transpose(1, 2);
  const at::Tensor y = attend(queries.reshape({q.size(0), q.size(1), q.size(3)}), all_tokens(keys), all_tokens(values));
  return y.view({q.size(0), 1, q.size(1), q.size(3)}).transpose(1, 2);
}

}  // namespace phalanx::kernels
