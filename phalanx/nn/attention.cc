#include "phalanx/nn/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>

#include "phalanx/kernels/float8_linear.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/rotary.h"

namespace phalanx::nn {

Attention::Attention(const AttentionOptions& options, TensorOptionsOfModule tensor)
    : SelfAttention("Attention", options.head_dim, options.query_scalar, options.window), options_(options) {
  const std::int64_t q_dim = options.n_heads * options.head_dim, kv_dim = options.n_kv_heads * options.head_dim;
  const bool bias = options.qkv_bias;
  wq = register_module("wq", std::make_shared<Linear>(LinearOptions{options.dim, q_dim, bias}, tensor));
  wk = register_module("wk", std::make_shared<Linear>(LinearOptions{options.dim, kv_dim, bias}, tensor));
  wv = register_module("wv", std::make_shared<Linear>(LinearOptions{options.dim, kv_dim, bias}, tensor));
  wo = register_module("wo", std::make_shared<Linear>(LinearOptions{q_dim, options.dim, options.output_bias}, tensor));
  share_storage();
  if (options.sinks) sinks = make_parameter("sinks", {options.n_heads}, tensor);
  if (options.qk_norm == QkNorm::none) return;
  const auto norm = [&](const char* name, std::int64_t heads) {
    const std::int64_t size = options.qk_norm == QkNorm::all_heads ? heads * options.head_dim : options.head_dim;
    return register_module(name, std::make_shared<RMSNorm>(size, options.norm_eps, tensor, options.norms_add_one));
  };
  q_norm = norm("q_norm", options.n_heads);
  k_norm = norm("k_norm", options.n_kv_heads);
}

std::vector<std::vector<at::Tensor>> Attention::one_products() const {
  if (wq->weight.device().is_cpu()) return {};
  return {{wq->weight, wk->weight, wv->weight}};
}

std::vector<at::Tensor> Attention::projections(const at::Tensor& x) {
  const bool must_be_called = wq->must_be_called() || wk->must_be_called() || wv->must_be_called();
  if (collective_matmul_ && !must_be_called && !wq->float8() && !wk->float8() && !wv->float8()) {
    std::vector<at::Tensor> qkv =
        collective_matmul_->all_gather_matmul(x, {wq->used_weight(), wk->used_weight(), wv->used_weight()});
    if (options_.qkv_bias) {
      qkv = {qkv[0] + wq->used_bias(), qkv[1] + wk->used_bias(), qkv[2] + wv->used_bias()};
    }
    return qkv;
  }
  const at::Tensor all = collective_matmul_ ? collective_matmul_->gather(x) : x;
  // Their own forward passes must happen where they have hooks, biases or an exchange.
  if (!must_be_called && wq->is_plain() && wk->is_plain() && wv->is_plain()) {
    return kernels::linears(all, {wq->used_weight(), wk->used_weight(), wv->used_weight()});
  }
  if (!must_be_called && share_float8(*wq, *wk, *wv)) {
    return kernels::float8_linears(all, {wq->used_weight(), wk->used_weight(), wv->used_weight()}, wq->float8());
  }
  return {call(wq, all), call(wk, all), call(wv, all)};
}

Attention::Heads Attention::heads(const at::Tensor& x, const RotaryTables& rope) {
  const std::vector<at::Tensor> qkv = projections(x);
  // The head counts are inferred: under tensor parallelism a rank holds only some of them.
  const auto split = [&](const at::Tensor& y, const std::shared_ptr<RMSNorm>& norm) {
    const bool by_head = norm && options_.qk_norm == QkNorm::each_head;
    const at::Tensor normed = norm && !by_head ? call(norm, y) : y;
    const at::Tensor heads = normed.view({y.size(0), y.size(1), -1, options_.head_dim});
    return (by_head ? call(norm, heads) : heads).transpose(1, 2);
  };
  const at::Tensor q = scaled(split(qkv[0], q_norm)), k = split(qkv[1], k_norm), v = split(qkv[2], nullptr);
  if (!options_.rotary) return {q, k, v};
  const kernels::RotatedPair turned = rotated(q, k, rope);
  return {turned.q, turned.k, v};
}

kernels::RotatedPair Attention::rotated(const at::Tensor& q, const at::Tensor& k, const RotaryTables& rope) const {
  const std::int64_t turned = options_.rotary_dim, kept = options_.head_dim - turned;
  if (turned == 0) return kernels::apply_rotary(q, k, rope.cos, rope.sin);
  const auto [q_first, k_first] =
      kernels::apply_rotary(q.narrow(-1, 0, turned), k.narrow(-1, 0, turned), rope.cos, rope.sin);
  return {at::cat({q_first, q.narrow(-1, turned, kept)}, -1), at::cat({k_first, k.narrow(-1, turned, kept)}, -1)};
}

at::Tensor Attention::project(const at::Tensor& y) {
  const at::Tensor rows = y.transpose(1, 2).reshape({y.size(0), y.size(2), -1});
  if (!collective_matmul_) return call(wo, rows);
  return wo->must_be_called() || wo->float8() ? collective_matmul_->scatter(call(wo, rows))
                                              : collective_matmul_->matmul_reduce_scatter(rows, wo->used_weight());
}

}  // namespace phalanx::nn
