#include "phalanx/kernels/attention_sinks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <limits>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/autocast.h"

namespace phalanx::kernels {
namespace {

/// [heads, 1], of log_sums' type.
at::Tensor scores_of(const at::Tensor& sinks, const at::Tensor& log_sums) {
  return sinks.to(log_sums.scalar_type()).unsqueeze(-1);
}

}  // namespace

void require_sinks_of(const std::string& what, const at::Tensor& q, const at::Tensor& sinks) {
  if (!sinks.defined() || (sinks.dim() == 1 && sinks.size(0) == q.size(1))) return;
  throw Error(fmt::format("{}: {} sinks for {} query heads; expected one for each", what, sinks.numel(), q.size(1)));
}

AttentionPart with_sinks(const AttentionPart& part, const at::Tensor& sinks) {
  if (!sinks.defined()) return part;
  const at::Tensor both = at::logaddexp(part.log_sums, scores_of(sinks, part.log_sums));  // [batch, heads, queries]
  const at::Tensor share = (part.log_sums - both).exp_().unsqueeze(-1);
  const bool is_wide = part.y.scalar_type() == share.scalar_type();
  return {is_wide ? part.y.mul_(share) : (part.y * share).to(part.y.scalar_type()), both};
}

at::Tensor sink_gradients(const at::Tensor& dy, const AttentionPart& whole, const at::Tensor& sinks) {
  if (!sinks.defined()) return {};
  const AutocastScope exact(dy.device().type(), {.enabled = false});
  const at::ScalarType type = whole.log_sums.scalar_type();
  const at::Tensor dot = (dy.to(type) * whole.y.to(type)).sum(-1);  // [batch, heads, queries]
  const at::Tensor share = (scores_of(sinks, whole.log_sums) - whole.log_sums).exp_();
  return dot.mul_(share).sum({0, 2}).neg_().to(sinks.scalar_type());
}

at::Tensor masked_attention_with_sinks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       const at::Tensor& mask, const at::Tensor& sinks) {
  const std::int64_t rows = mask.dim() == 4 ? mask.size(0) : 1, heads = q.size(1), queries = q.size(2);
  const at::Tensor unseen =
      at::zeros(mask.sizes(), q.options()).masked_fill_(mask.logical_not(), -std::numeric_limits<double>::infinity());
  const at::Tensor scores = at::cat({unseen.expand({rows, heads, queries, k.size(2)}),
                                     sinks.to(q.scalar_type()).view({1, heads, 1, 1}).expand({rows, -1, queries, 1})},
                                    -1);
  const auto with_zeros = [](const at::Tensor& t) {
    return at::cat({t, at::zeros({t.size(0), t.size(1), 1, t.size(3)}, t.options())}, 2);
  };
  return at::scaled_dot_product_attention(q, with_zeros(k), with_zeros(v), scores, /*dropout_p=*/0.0,
                                          /*is_causal=*/false, /*scale=*/std::nullopt,
                                          /*enable_gqa=*/heads != k.size(1));
}

}  // namespace phalanx::kernels
