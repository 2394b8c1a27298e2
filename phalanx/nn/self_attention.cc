#include "phalanx/nn/self_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <optional>

#include "phalanx/kernels/attention_sinks.h"
#include "phalanx/kernels/cached_attention.h"
#include "phalanx/kernels/causal_attention.h"
#include "phalanx/kernels/skinny_gemm.h"

namespace phalanx::nn {

at::Tensor SelfAttention::scaled(const at::Tensor& q) const {
  if (query_scalar_ == 0.0 || query_scalar_ == static_cast<double>(head_dim_)) return q;
  return q * std::sqrt(static_cast<double>(head_dim_) / query_scalar_);
}

at::Tensor SelfAttention::forward(const at::Tensor& x, const RotaryTables& rope,
                                  const std::shared_ptr<const DocumentBoundaries>& documents) {
  const auto [q, k, v] = heads(x, rope);
  const at::Tensor sinks = used_sinks();
  return project(context_ ? context_->attend(q, k, v, {.window = window_, .documents = documents, .sinks = sinks})
                          : kernels::causal_attention(q, k, v, window_, documents, sinks));
}

at::Tensor SelfAttention::forward(const at::Tensor& x, const RotaryTables& rope, KvCache& cache, std::int64_t layer) {
  const auto [q, k, v] = heads(x, rope);
  const auto [keys, values] = cache.append(layer, k, v);
  const at::Tensor sinks = used_sinks();
  // The cache was empty: queries and keys are the same tokens, and padding comes behind the real tokens.
  if (cache.is_first()) return project(kernels::causal_attention(q, k, v, window_, nullptr, sinks));
  if (kernels::can_use_decode_attention(q, keys, values)) {
    return project(kernels::decode_attention(q, keys, values, cache.seen(), window_, sinks));
  }
  if (kernels::can_use_cached_attention(q, keys, values)) {
    return project(kernels::cached_attention(q, keys, values, cache.lengths_on_device(), window_, sinks));
  }
  const at::Tensor& mask = cache.mask(window_);
  if (sinks.defined()) {
    const at::Tensor all = at::ones({q.size(2), keys.size(2)}, q.options().dtype(at::kBool));
    return project(kernels::masked_attention_with_sinks(q, keys, values, mask.defined() ? mask : all, sinks));
  }
  return project(at::scaled_dot_product_attention(q, keys, values, mask.defined() ? std::optional(mask) : std::nullopt,
                                                  /*dropout_p=*/0.0, /*is_causal=*/false, /*scale=*/std::nullopt,
                                                  /*enable_gqa=*/q.size(1) != keys.size(1)));
}

}  // namespace phalanx::nn
