#include "phalanx/nn/latent_attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include "phalanx/kernels/rotary.h"

namespace phalanx::nn {
namespace {

/// x [batch, seq, heads, n] -> [batch, heads, seq, n], where pairs of neighbours are n / 2 elements apart, as
/// apply_rotary() wants them.
at::Tensor halves_of_pairs(const at::Tensor& x) {
  return x.unflatten(-1, {x.size(-1) / 2, 2}).transpose(-1, -2).flatten(-2).transpose(1, 2);
}

}  // namespace

LatentAttention::LatentAttention(const LatentAttentionOptions& options, TensorOptionsOfModule tensor)
    : SelfAttention("LatentAttention", options.head_dim, options.query_scalar, /*window=*/0), options_(options) {
  const std::int64_t of_queries = options.n_heads * options.head_dim;
  const auto linear = [&](const char* name, std::int64_t in, std::int64_t out) {
    return register_module(name, std::make_shared<Linear>(LinearOptions{in, out}, tensor));
  };
  const auto norm = [&](const char* name, std::int64_t size) {
    return register_module(name, std::make_shared<RMSNorm>(size, options.norm_eps, tensor));
  };
  if (options.q_rank == 0) {
    wq = linear("wq", options.dim, of_queries);
  } else {
    wq_a = linear("wq_a", options.dim, options.q_rank);
    q_norm = norm("q_norm", options.q_rank);
    wq_b = linear("wq_b", options.q_rank, of_queries);
  }
  wkv_a = linear("wkv_a", options.dim, options.kv_rank + options.rope);
  kv_norm = norm("kv_norm", options.kv_rank);
  wkv_b = linear("wkv_b", options.kv_rank, options.n_heads * (options.head_dim - options.rope + options.value_dim));
  wo = linear("wo", options.n_heads * options.value_dim, options.dim);
}

LatentAttention::Heads LatentAttention::heads(const at::Tensor& x, const RotaryTables& rope) {
  const std::int64_t rotated = options_.rope, plain = options_.head_dim - rotated;
  // The head counts are inferred: under tensor parallelism a rank holds only some of them.
  const auto split = [](const at::Tensor& y, std::int64_t size) { return y.unflatten(-1, {-1, size}); };
  const at::Tensor q = split(wq ? call(wq, x) : call(wq_b, call(q_norm, call(wq_a, x))), options_.head_dim);
  const at::Tensor both = call(wkv_a, x);
  const at::Tensor latent = both.narrow(-1, 0, options_.kv_rank).contiguous();
  const at::Tensor shared = both.narrow(-1, options_.kv_rank, rotated).unsqueeze(2);  // by all heads
  const at::Tensor kv = split(call(wkv_b, call(kv_norm, latent)), plain + options_.value_dim).transpose(1, 2);
  const kernels::RotatedPair turned =
      kernels::apply_rotary(halves_of_pairs(q.narrow(-1, plain, rotated)), halves_of_pairs(shared), rope.cos, rope.sin);
  const at::Tensor v = kv.narrow(-1, plain, options_.value_dim);
  return {.q = scaled(at::cat({q.narrow(-1, 0, plain).transpose(1, 2), turned.q}, -1)),
          .k = at::cat({kv.narrow(-1, 0, plain), turned.k.expand({-1, kv.size(1), -1, -1})}, -1),
          .v = options_.value_dim == options_.head_dim
                   ? v
                   : at::constant_pad_nd(v, {0, options_.head_dim - options_.value_dim})};
}

at::Tensor LatentAttention::project(const at::Tensor& y) {
  return call(wo, y.narrow(-1, 0, options_.value_dim).transpose(1, 2).flatten(-2));
}

std::int64_t LatentAttention::cached_heads() const {
  return wkv_b->weight.size(0) / (options_.head_dim - options_.rope + options_.value_dim);
}

}  // namespace phalanx::nn
