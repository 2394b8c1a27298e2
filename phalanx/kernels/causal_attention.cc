#include "phalanx/kernels/causal_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/attention_queries.h"
#include "phalanx/kernels/attention_sinks.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/partial_attention.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/saved_attention.h"
#include "phalanx/kernels/variable_length_attention.h"

namespace phalanx::kernels {
namespace {

using Documents = std::shared_ptr<const DocumentBoundaries>;

/// For the backward pass.
struct SavedQueries : torch::CustomClassHolder {
  SavedQueries(AttentionQueries queries, AttentionKernel kernel) : queries(std::move(queries)), kernel(kernel) {}
  AttentionQueries queries;
  AttentionKernel kernel;
};

/// Keeps its inputs, its result and the log-sum-exps. A checkpointed layer may save its outputs.
struct FusedAttention : torch::autograd::Function<FusedAttention> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::optional<at::Tensor>& given_sinks,
                            const AttentionQueries& queries) {
    const at::Tensor sinks = given_sinks.value_or(at::Tensor());
    const AttentionKernel kernel = attention_kernel_for(q, k, v);
    const auto compute = [&]() -> std::vector<at::Tensor> {
      AttentionPart whole = with_sinks(attend(kernel, q, k, v, queries), sinks);
      return {whole.y.to(q.scalar_type()), std::move(whole.log_sums)};
    };
    const auto outputs = computed_once(SavedOp::attention, compute);
    ctx->save_for_backward({q, k, v, outputs[1], sinks});
    ctx->saved_data["y"] = outputs[0].detach();  // values for the backward pass, outside the graph
    ctx->saved_data["queries"] = c10::IValue::make_capsule(c10::make_intrusive<SavedQueries>(queries, kernel));
    return outputs[0];
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const auto& saved_queries = static_cast<SavedQueries&>(*ctx->saved_data["queries"].toCapsule());
    const AttentionPart whole{.y = ctx->saved_data["y"].toTensor(), .log_sums = saved[3]};
    const AttentionGradients g =
        attention_gradients(saved_queries.kernel, grads[0], q, k, v, whole, saved_queries.queries);
    return {g.dq.to(q.scalar_type()), g.dk.to(k.scalar_type()), g.dv.to(v.scalar_type()),
            sink_gradients(grads[0], whole, saved[4]), at::Tensor()};
  }
};

/// 0 if no query sees less for it.
std::int64_t effective(std::int64_t window, const Documents& documents, std::int64_t seq) {
  return window < (documents ? documents->longest() : seq) ? window : 0;
}

/// Throws Error unless the shapes fit and the positions of each row are increasing ones of
/// the keys, one for each query.
void require_positions(const char* who, const at::Tensor& q, const at::Tensor& k, const Documents& documents,
                       const at::Tensor& sinks, std::span<const std::vector<PositionRange>> rows) {
  require_sinks_of(who, q, sinks);
  const bool documents_fit = !documents || (documents->rows() == q.size(0) && documents->seq_len() == k.size(2));
  for (const std::vector<PositionRange>& positions : rows) {
    bool positions_fit = q.size(2) > 0;
    std::int64_t end = 0, queries = 0;
    for (const auto& [first, count] : positions) {
      positions_fit = positions_fit && first >= end && count >= 0;
      end = first + count;
      queries += count;
    }
    positions_fit = positions_fit && queries == q.size(2) && end <= k.size(2);
    if (documents_fit && positions_fit && k.size(0) == q.size(0) && q.size(1) % k.size(1) == 0) continue;
    throw Error(fmt::format(
        "{}: {} rows of {} queries at {} positions up to {}, {} rows of {} keys{}; expected increasing positions of "
        "the keys, one for each query, and documents of the keys' rows",
        who, q.size(0), q.size(2), queries, end, k.size(0), k.size(2),
        documents ? fmt::format(", documents of {} rows of {}", documents->rows(), documents->seq_len()) : ""));
  }
}

at::Tensor attention_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& sinks,
                        const AttentionQueries& queries) {
  return FusedAttention::apply(in_autocast_type(q), in_autocast_type(k), in_autocast_type(v), if_defined(sinks),
                               queries);
}

}  // namespace

at::Tensor causal_attention_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      std::int64_t window, const DocumentBoundaries* documents,
                                      const at::Tensor& sinks) {
  std::optional<at::Tensor> mask;
  if (window > 0 || documents != nullptr || sinks.defined()) {
    const at::Tensor at = at::arange(q.size(2), at::TensorOptions(at::kLong).device(q.device()));
    const at::Tensor distance = at.unsqueeze(1) - at;
    mask = distance >= 0;
    if (window > 0) mask = *mask & (distance < window);
    if (documents != nullptr) {
      const at::Tensor start = (at - documents->positions()).unsqueeze(1);  // [rows, 1, seq]
      mask = *mask & (start.unsqueeze(2) == start.unsqueeze(3));            // [rows, 1, seq, seq]
    }
  }
  if (sinks.defined()) return masked_attention_with_sinks(q, k, v, *mask, sinks);
  return at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, /*is_causal=*/!mask.has_value(),
                                          /*scale=*/std::nullopt, /*enable_gqa=*/q.size(1) != k.size(1));
}

at::Tensor causal_attention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, std::int64_t window,
                            const Documents& documents, const at::Tensor& sinks) {
  require_sinks_of("causal_attention", q_in, sinks);
  if (documents &&
      (documents->rows() != q_in.size(0) || documents->seq_len() != q_in.size(2) || k_in.size(2) != q_in.size(2))) {
    throw Error(
        fmt::format("causal_attention: document boundaries of {} rows of {} tokens; expected those of queries "
                    "and keys, {} rows of {} and {}",
                    documents->rows(), documents->seq_len(), q_in.size(0), q_in.size(2), k_in.size(2)));
  }
  const std::int64_t least = effective(window, documents, q_in.size(2));
  if (documents && !sinks.defined() && can_use_variable_lengths(q_in, least > 0)) {
    return variable_length_attention(q_in, k_in, v_in, least, *documents);
  }
  const at::Tensor q = in_autocast_type(q_in), k = in_autocast_type(k_in), v = in_autocast_type(v_in);
  const bool fits = q.dim() == 4 && q.numel() > 0 && q.size(2) == k.size(2) && q.size(1) % k.size(1) == 0;
  const bool is_plain = !documents && least == 0 && !sinks.defined();
  if (fits && is_plain) {
    if (const auto kernel = savable_attention(q, k, v)) return saved_attention(*kernel, q, k, v);
  }
  // ATen's operator chooses among the same kernels of devices.
  if (!fits || (is_plain && (!q.device().is_cpu() || attention_kernel_for(q, k, v) == AttentionKernel::operators))) {
    return causal_attention_reference(q, k, v, least, documents.get(), sinks);
  }
  return FusedAttention::apply(q, k, v, if_defined(sinks), AttentionQueries::all(q.size(2), documents, least));
}

at::Tensor causal_attention_of_positions(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                         const std::vector<PositionRange>& positions, std::int64_t window,
                                         const Documents& documents, const at::Tensor& sinks) {
  require_positions("causal_attention_of_positions", q, k, documents, sinks, {&positions, 1});
  return attention_of(q, k, v, sinks,
                      {.ranges = positions,
                       .seq = k.size(2),
                       .documents = documents,
                       .window = effective(window, documents, k.size(2))});
}

at::Tensor causal_attention_of_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const std::vector<std::vector<PositionRange>>& positions, std::int64_t window,
                                    const Documents& documents, const at::Tensor& sinks) {
  require_positions("causal_attention_of_rows", q, k, documents, sinks, positions);
  if (std::ssize(positions) != q.size(0) || !documents) {
    throw Error(fmt::format(
        "causal_attention_of_rows: positions of {} rows{}; expected those of the queries' {} rows, and their documents",
        positions.size(), documents ? "" : " without documents", q.size(0)));
  }
  return attention_of(q, k, v, sinks,
                      {.ranges = {},
                       .seq = k.size(2),
                       .documents = documents,
                       .window = effective(window, documents, k.size(2)),
                       .ranges_of_rows = positions});
}

}  // namespace phalanx::kernels
