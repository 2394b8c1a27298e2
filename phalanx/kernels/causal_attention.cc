#include "phalanx/kernels/causal_attention.h"

#include <ATen/Parallel.h>
#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/attention_queries.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/fusible.h"
#include "phalanx/kernels/row_kernels.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/variable_length_attention.h"

// libtorch's own BLAS, called without the dispatcher: a block's products take 25 us, a dispatched op takes several.
// Declared weak, because not every build of libtorch exports it. If it is missing, the ATen op is used.
extern "C" __attribute__((weak)) void sgemm_(const char* transpose_a, const char* transpose_b, const int* m,
                                             const int* n, const int* k, const float* alpha, const float* a,
                                             const int* lda, const float* b, const int* ldb, const float* beta,
                                             float* c, const int* ldc);

namespace phalanx::kernels {
namespace {

constexpr std::int64_t kQueryBlock = 64;
constexpr std::int64_t kRowsOfMask = 256;  // of attention in blocks

/// A row-major matrix with contiguous rows `stride` apart; transposed() is read the other way round.
struct Matrix {
  const float* data;
  std::int64_t stride;
  bool transpose = false;
  Matrix transposed() const { return {data, stride, !transpose}; }
};

/// c [m, n] = alpha a [m, k] b [k, n] + beta c, in row-major terms: BLAS sees the transposes of all three.
void multiply(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const Matrix& a, const Matrix& b, float beta,
              float* c, std::int64_t c_stride) {
  const char ta = a.transpose ? 'T' : 'N', tb = b.transpose ? 'T' : 'N';
  const int im = static_cast<int>(m), in = static_cast<int>(n), ik = static_cast<int>(k);
  const int lda = static_cast<int>(a.stride), ldb = static_cast<int>(b.stride), ldc = static_cast<int>(c_stride);
  sgemm_(&tb, &ta, &in, &im, &ik, &alpha, b.data, &ldb, a.data, &lda, &beta, c, &ldc);
}

/// One head of a tensor [batch, heads, seq, head_dim] with contiguous head_dim.
template <class Float>
struct Head {
  Float* data;
  std::int64_t stride;  // between positions
  Matrix rows(std::int64_t first) const { return {data + first * stride, stride}; }
};
Head<const float> head_of(const at::Tensor& t, std::int64_t batch, std::int64_t head) {
  return {t.const_data_ptr<float>() + batch * t.stride(0) + head * t.stride(1), t.stride(2)};
}
Head<float> mutable_head_of(const at::Tensor& t, std::int64_t batch, std::int64_t head) {
  return {t.mutable_data_ptr<float>() + batch * t.stride(0) + head * t.stride(1), t.stride(2)};
}

at::Tensor with_contiguous_heads(const at::Tensor& t) {
  return t.stride(-1) == 1 && t.stride(2) >= t.size(3) ? t : t.contiguous();
}

/// [batch, heads, seq, head_dim] with memory layout [batch, seq, heads, head_dim], as the projections around it need
/// it.
at::Tensor empty_heads_like(const at::Tensor& t) {
  return at::empty({t.size(0), t.size(2), t.size(1), t.size(3)}, t.options()).transpose(1, 2);
}

using Documents = std::shared_ptr<const DocumentBoundaries>;

/// For the backward pass.
struct KeptQueries : torch::CustomClassHolder {
  explicit KeptQueries(AttentionQueries kept) : queries(std::move(kept)) {}
  AttentionQueries queries;
};

void keep(torch::autograd::AutogradContext& ctx, const AttentionQueries& queries) {
  ctx.saved_data["queries"] = c10::IValue::make_capsule(c10::make_intrusive<KeptQueries>(queries));
}
AttentionQueries kept_queries(torch::autograd::AutogradContext& ctx) {
  return static_cast<KeptQueries&>(*ctx.saved_data["queries"].toCapsule()).queries;
}

/// Calls use(first token within the row, number of tokens) for each document of a row of `seq` tokens.
template <class Use>
void for_each_document(const Documents& documents, std::int64_t row, std::int64_t seq, const Use& use) {
  for_each_segment(AttentionQueries::all(seq, documents), row,
                   [&](const QuerySegment& segment) { use(segment.query, segment.count); });
}

std::int64_t longest_of(const Documents& documents, std::int64_t seq) { return documents ? documents->longest() : seq; }

/// Tokens [first, first + count) of a row of [batch, heads, seq, head_dim].
at::Tensor document_of(const at::Tensor& t, std::int64_t row, std::int64_t first, std::int64_t count) {
  return t.narrow(0, row, 1).narrow(2, first, count);
}

/// attend(q, k, v) of each document alone, put together.
template <class Attend>
at::Tensor each_document(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Documents& documents,
                         const Attend& attend) {
  std::vector<at::Tensor> rows;
  for (std::int64_t row = 0; row < q.size(0); ++row) {
    std::vector<at::Tensor> results;
    for_each_document(documents, row, q.size(2), [&](std::int64_t first, std::int64_t count) {
      const auto of = [&](const at::Tensor& t) { return document_of(t, row, first, count); };
      results.push_back(attend(of(q), of(k), of(v)));
    });
    rows.push_back(at::cat(results, 2));
  }
  return at::cat(rows, 0);
}

/// The attention's output, and the log-sum-exp of each query's scores [batch, heads, seq].
std::vector<at::Tensor> attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const AttentionQueries& queries) {
  const std::int64_t batch = q.size(0), heads = q.size(1), seq = q.size(2), dim = q.size(3);
  const std::int64_t group = heads / k.size(1);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const at::Tensor y = empty_heads_like(q), log_sums = at::empty({batch, heads, seq}, q.options());
  float* log_sum = log_sums.mutable_data_ptr<float>();
  at::parallel_for(0, batch * heads, 1, [&](std::int64_t from, std::int64_t to) {
    std::vector<float> scores(static_cast<std::size_t>(kQueryBlock * queries.longest()));
    for (std::int64_t task = from; task < to; ++task) {
      const std::int64_t b = task / heads, h = task % heads;
      const auto query = head_of(q, b, h), key = head_of(k, b, h / group), value = head_of(v, b, h / group);
      const auto out = mutable_head_of(y, b, h);
      for_each_segment(queries, b, [&](const QuerySegment& segment) {
        for (std::int64_t first = 0; first < segment.count; first += kQueryBlock) {
          const std::int64_t n = std::min(kQueryBlock, segment.count - first), at = segment.query + first;
          const std::int64_t unmasked = segment.before + first, seen = unmasked + n;
          multiply(n, seen, dim, scale, query.rows(at), key.rows(segment.key).transposed(), 0.0f, scores.data(), seen);
          row_kernels().causal_softmax(n, seen, unmasked, scores.data(), log_sum + task * seq + at);
          multiply(n, dim, seen, 1.0f, {scores.data(), seen}, value.rows(segment.key), 0.0f, out.data + at * out.stride,
                   out.stride);
        }
      });
    }
  });
  return {y, log_sums};
}

struct CausalAttentionFunction : torch::autograd::Function<CausalAttentionFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q_in, const at::Tensor& k_in,
                            const at::Tensor& v_in, const AttentionQueries& queries) {
    const at::Tensor q = with_contiguous_heads(q_in), k = with_contiguous_heads(k_in), v = with_contiguous_heads(v_in);
    const auto outputs = computed_once(SavedOp::attention, [&] { return attend(q, k, v, queries); });
    const at::Tensor &y = outputs[0], &log_sums = outputs[1];
    ctx->save_for_backward({q, k, v, log_sums});
    keep(*ctx, queries);
    ctx->saved_data["y"] = y.detach();  // values for the backward pass, outside the graph
    return y;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &log_sums = saved[3];
    const at::Tensor y = ctx->saved_data["y"].toTensor(), dy = with_contiguous_heads(grads[0]);
    const AttentionQueries queries = kept_queries(*ctx);
    const std::int64_t batch = q.size(0), heads = q.size(1), kv_heads = k.size(1), seq = q.size(2), dim = q.size(3);
    const std::int64_t group = heads / kv_heads, keys = k.size(2);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const at::Tensor dq = empty_heads_like(q), dk = empty_heads_like(k), dv = empty_heads_like(v);
    // One task owns a key head with all the query heads that share it, so its sums have one order.
    at::parallel_for(0, batch * kv_heads, 1, [&](std::int64_t from, std::int64_t to) {
      std::vector<float> p(static_cast<std::size_t>(kQueryBlock * queries.longest())), dp(p.size());
      for (std::int64_t task = from; task < to; ++task) {
        const std::int64_t b = task / kv_heads, kv = task % kv_heads;
        const auto key = head_of(k, b, kv), value = head_of(v, b, kv);
        const auto dkey = mutable_head_of(dk, b, kv), dvalue = mutable_head_of(dv, b, kv);
        for (const auto& sum : {dkey, dvalue}) {
          for (std::int64_t t = 0; t < keys; ++t) std::fill_n(sum.data + t * sum.stride, dim, 0.0f);
        }
        for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
          const auto query = head_of(q, b, h), out = head_of(y, b, h), dout = head_of(dy, b, h);
          const auto dquery = mutable_head_of(dq, b, h);
          const float* log_sum = log_sums.const_data_ptr<float>() + (b * heads + h) * seq;
          for_each_segment(queries, b, [&](const QuerySegment& segment) {
            float *dvalues = dvalue.data + segment.key * dvalue.stride, *dkeys = dkey.data + segment.key * dkey.stride;
            for (std::int64_t first = 0; first < segment.count; first += kQueryBlock) {
              const std::int64_t n = std::min(kQueryBlock, segment.count - first), at = segment.query + first;
              const std::int64_t unmasked = segment.before + first, seen = unmasked + n;
              const Matrix probability = {p.data(), seen}, dscore = {dp.data(), seen};
              multiply(n, seen, dim, scale, query.rows(at), key.rows(segment.key).transposed(), 0.0f, p.data(), seen);
              multiply(n, seen, dim, 1.0f, dout.rows(at), value.rows(segment.key).transposed(), 0.0f, dp.data(), seen);
              row_kernels().causal_softmax_backward(n, seen, unmasked, dim, scale, log_sum + at,
                                                    out.data + at * out.stride, out.stride,
                                                    dout.data + at * dout.stride, dout.stride, p.data(), dp.data());
              multiply(seen, dim, n, 1.0f, probability.transposed(), dout.rows(at), 1.0f, dvalues, dvalue.stride);
              multiply(seen, dim, n, 1.0f, dscore.transposed(), query.rows(at), 1.0f, dkeys, dkey.stride);
              multiply(n, dim, seen, 1.0f, dscore, key.rows(segment.key), 0.0f, dquery.data + at * dquery.stride,
                       dquery.stride);
            }
          });
        }
      }
    });
    return {dq, dk, dv, at::Tensor()};
  }
};

// libtorch's own kernel for 16 bits on the CPU, which at::scaled_dot_product_attention() uses there. Called directly so
// that a checkpointed layer may save its outputs.
//
// It knows the causal mask of as many queries as keys. Queries that follow other keys of their document are attended to
// those in a second call, and the two results are merged by their log-sums. Either backward pass gets the merged result
// and log-sum, so that its probabilities are those of all keys.
struct FlashAttentionFunction : torch::autograd::Function<FlashAttentionFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const AttentionQueries& queries) {
    const auto outputs = computed_once(SavedOp::attention, [&] { return attend(q, k, v, queries); });
    torch::autograd::variable_list saved = {q, k, v};
    saved.insert(saved.end(), outputs.begin() + 1, outputs.end());
    ctx->save_for_backward(saved);
    keep(*ctx, queries);
    ctx->saved_data["y"] = outputs[0].detach();  // values for the backward pass, outside the graph
    return outputs[0];
  }

  /// The output, then the log-sum-exp of each segment in turn.
  static std::vector<at::Tensor> attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const AttentionQueries& queries) {
    const auto attended = [](const at::Tensor& some_q, const at::Tensor& some_k, const at::Tensor& some_v,
                             bool is_causal) {
      return at::_scaled_dot_product_flash_attention_for_cpu(some_q, some_k, some_v, /*dropout_p=*/0.0, is_causal);
    };
    if (queries.is_all() && !queries.documents) {
      auto [y, log_sums] = attended(q, k, v, /*is_causal=*/true);
      return {std::move(y), std::move(log_sums)};
    }
    std::vector<at::Tensor> outputs = {empty_heads_like(q)};
    for_each_segment_of_rows(queries, q.size(0), [&](std::int64_t row, std::int64_t rows, const QuerySegment& s) {
      const auto of = [&](const at::Tensor& t, std::int64_t first, std::int64_t count) {
        return t.narrow(0, row, rows).narrow(2, first, count);
      };
      const at::Tensor q_of = of(q, s.query, s.count);
      auto [y, log_sums] = attended(q_of, of(k, s.key + s.before, s.count), of(v, s.key + s.before, s.count),
                                    /*is_causal=*/true);
      if (s.before > 0) {
        const auto [y_before, log_sums_before] =
            attended(q_of, of(k, s.key, s.before), of(v, s.key, s.before), /*is_causal=*/false);
        const at::Tensor merged = at::logaddexp(log_sums, log_sums_before);
        y = y.to(at::kFloat) * (log_sums - merged).exp().unsqueeze(-1) +
            y_before.to(at::kFloat) * (log_sums_before - merged).exp().unsqueeze(-1);
        log_sums = merged;
      }
      of(outputs[0], s.query, s.count).copy_(y);
      outputs.push_back(std::move(log_sums));
    });
    return outputs;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], y = ctx->saved_data["y"].toTensor();
    const AttentionQueries queries = kept_queries(*ctx);
    if (queries.is_all() && !queries.documents) {
      auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          grads[0], q, k, v, y, saved[3], /*dropout_p=*/0.0, /*is_causal=*/true);
      return {std::move(dq), std::move(dk), std::move(dv), at::Tensor()};
    }
    // Keys get gradients from several segments if queries are some positions only: those are summed in float32.
    const bool adds = !queries.is_all();
    const at::Tensor dq = empty_heads_like(q);
    const at::Tensor dk = adds ? at::zeros_like(k, at::kFloat) : empty_heads_like(k);
    const at::Tensor dv = adds ? at::zeros_like(v, at::kFloat) : empty_heads_like(v);
    std::size_t number = 3;
    for_each_segment_of_rows(queries, q.size(0), [&](std::int64_t row, std::int64_t rows, const QuerySegment& s) {
      const auto of = [&](const at::Tensor& t, std::int64_t first, std::int64_t count) {
        return t.narrow(0, row, rows).narrow(2, first, count);
      };
      const auto of_queries = [&](const at::Tensor& t) { return of(t, s.query, s.count); };
      const at::Tensor& log_sums = saved[number++];
      const auto pass = [&](std::int64_t first, std::int64_t count, bool is_causal) {
        auto [dq_part, dk_part, dv_part] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
            of_queries(grads[0]), of_queries(q), of(k, first, count), of(v, first, count), of_queries(y), log_sums,
            /*dropout_p=*/0.0, is_causal);
        for (const auto& [sum, part] : {std::pair(dk, dk_part), std::pair(dv, dv_part)}) {
          adds ? of(sum, first, count).add_(part) : of(sum, first, count).copy_(part);
        }
        return dq_part;
      };
      at::Tensor dq_of = pass(s.key + s.before, s.count, /*is_causal=*/true);
      if (s.before > 0) dq_of = dq_of.to(at::kFloat) + pass(s.key, s.before, /*is_causal=*/false);
      of_queries(dq).copy_(dq_of);
    });
    return {dq, dk.to(k.scalar_type()), dv.to(v.scalar_type()), at::Tensor()};
  }
};

bool can_use_flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto is_narrow = [](const at::Tensor& t) {
    return t.device().is_cpu() && (t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf);
  };
  return is_narrow(q) && is_narrow(k) && is_narrow(v) &&
         at::_fused_sdp_choice(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
                               /*scale=*/std::nullopt, /*enable_gqa=*/q.size(1) != k.size(1)) ==
             static_cast<std::int64_t>(at::SDPBackend::flash_attention);
}

at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window) {
  const std::int64_t seq = q.size(2), block = std::max(window, kQueryBlock);
  const auto integers = at::TensorOptions(at::kLong).device(q.device());
  std::vector<at::Tensor> rows;
  for (std::int64_t first = 0; first < seq; first += block) {
    const std::int64_t n = std::min(block, seq - first);
    const std::int64_t from = std::max<std::int64_t>(first - window + 1, 0), keys = first + n - from;
    const at::Tensor distance =
        at::arange(first, first + n, integers).unsqueeze(1) - at::arange(from, from + keys, integers);
    rows.push_back(at::scaled_dot_product_attention(q.narrow(2, first, n), k.narrow(2, from, keys),
                                                    v.narrow(2, from, keys), (distance >= 0) & (distance < window),
                                                    /*dropout_p=*/0.0, /*is_causal=*/false, /*scale=*/std::nullopt,
                                                    /*enable_gqa=*/q.size(1) != k.size(1)));
  }
  return at::cat(rows, 2);
}

/// By ATen's operators, in blocks of queries: each has a mask of its own.
at::Tensor attention_in_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const AttentionQueries& queries, std::int64_t window) {
  const std::int64_t block = std::max(window, kRowsOfMask);
  const auto integers = at::TensorOptions(at::kLong).device(q.device());
  std::vector<at::Tensor> rows, results;
  std::int64_t row_of_results = 0;
  for_each_segment_of_rows(queries, q.size(0), [&](std::int64_t row, std::int64_t count, const QuerySegment& s) {
    if (row != row_of_results) rows.push_back(at::cat(std::exchange(results, {}), 2));
    row_of_results = row;
    const auto of = [&](const at::Tensor& t, std::int64_t first, std::int64_t n) {
      return t.narrow(0, row, count).narrow(2, first, n);
    };
    for (std::int64_t first = 0; first < s.count; first += block) {
      const std::int64_t n = std::min(block, s.count - first), at = s.before + first;  // in the document
      const std::int64_t from = window > 0 ? std::max<std::int64_t>(at - window + 1, 0) : 0, keys = at + n - from;
      const at::Tensor distance =
          at::arange(at, at + n, integers).unsqueeze(1) - at::arange(from, from + keys, integers);
      const at::Tensor mask = window > 0 ? (distance >= 0) & (distance < window) : distance >= 0;
      results.push_back(at::scaled_dot_product_attention(
          of(q, s.query + first, n), of(k, s.key + from, keys), of(v, s.key + from, keys), mask, /*dropout_p=*/0.0,
          /*is_causal=*/false, /*scale=*/std::nullopt, /*enable_gqa=*/q.size(1) != k.size(1)));
    }
  });
  rows.push_back(at::cat(results, 2));
  return rows.size() == 1 ? rows[0] : at::cat(rows, 0);
}

}  // namespace

at::Tensor causal_attention_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      std::int64_t window, const DocumentBoundaries* documents) {
  std::optional<at::Tensor> mask;
  if (window > 0 || documents != nullptr) {
    const at::Tensor at = at::arange(q.size(2), at::TensorOptions(at::kLong).device(q.device()));
    const at::Tensor distance = at.unsqueeze(1) - at;
    mask = distance >= 0;
    if (window > 0) mask = *mask & (distance < window);
    if (documents != nullptr) {
      const at::Tensor start = (at - documents->positions()).unsqueeze(1);  // [rows, 1, seq]
      mask = *mask & (start.unsqueeze(2) == start.unsqueeze(3));            // [rows, 1, seq, seq]
    }
  }
  return at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, /*is_causal=*/!mask.has_value(),
                                          /*scale=*/std::nullopt, /*enable_gqa=*/q.size(1) != k.size(1));
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window,
                            const Documents& documents) {
  if (documents && (documents->rows() != q.size(0) || documents->seq_len() != q.size(2) || k.size(2) != q.size(2))) {
    throw Error(
        fmt::format("causal_attention: document boundaries of {} rows of {} tokens; expected those of queries "
                    "and keys, {} rows of {} and {}",
                    documents->rows(), documents->seq_len(), q.size(0), q.size(2), k.size(2)));
  }
  const bool is_windowed = window > 0 && window < longest_of(documents, q.size(2));
  if (documents && can_use_variable_lengths(q, is_windowed)) {
    return variable_length_attention(q, k, v, is_windowed ? window : 0, *documents);
  }
  if (is_windowed) {
    return documents ? each_document(q, k, v, documents,
                                     [&](const at::Tensor& q_of, const at::Tensor& k_of, const at::Tensor& v_of) {
                                       return causal_attention(q_of, k_of, v_of, window);
                                     })
                     : windowed_attention(q, k, v, window);
  }
  const bool whole = q.dim() == 4 && q.numel() > 0 && q.size(2) == k.size(2) && q.size(1) % k.size(1) == 0;
  if (whole && sgemm_ != nullptr && fusible(q, k, v)) {
    return CausalAttentionFunction::apply(q, k, v, AttentionQueries::all(q.size(2), documents));
  }
  if (whole && q.device().is_cpu()) {
    const at::Tensor q16 = in_autocast_type(q), k16 = in_autocast_type(k), v16 = in_autocast_type(v);
    if (can_use_flash_attention(q16, k16, v16)) {
      return FlashAttentionFunction::apply(q16, k16, v16, AttentionQueries::all(q.size(2), documents));
    }
  }
  if (!documents) return causal_attention_reference(q, k, v);
  return each_document(q, k, v, documents, [](const at::Tensor& q_of, const at::Tensor& k_of, const at::Tensor& v_of) {
    return causal_attention_reference(q_of, k_of, v_of);
  });
}

at::Tensor causal_attention_of_positions(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                         const std::vector<PositionRange>& positions, std::int64_t window,
                                         const Documents& documents) {
  const AttentionQueries queries{.ranges = positions, .keys = k.size(2), .documents = documents};
  const bool documents_fit = !documents || (documents->rows() == q.size(0) && documents->seq_len() == k.size(2));
  bool positions_fit = queries.count() == q.size(2) && q.size(2) > 0;
  std::int64_t end = 0;
  for (const auto& [first, count] : positions) {
    positions_fit = positions_fit && first >= end && count >= 0;
    end = first + count;
  }
  if (!documents_fit || !positions_fit || end > k.size(2) || k.size(0) != q.size(0) || q.size(1) % k.size(1) != 0) {
    throw Error(fmt::format(
        "causal_attention_of_positions: {} rows of {} queries at {} positions up to {}, {} rows of {} keys{}; "
        "expected increasing positions of the keys, one for each query, and documents of the keys' rows",
        q.size(0), q.size(2), queries.count(), end, k.size(0), k.size(2),
        documents ? fmt::format(", documents of {} rows of {}", documents->rows(), documents->seq_len()) : ""));
  }
  const bool is_windowed = window > 0 && window < queries.longest();
  if (!is_windowed && sgemm_ != nullptr && fusible(q, k, v)) return CausalAttentionFunction::apply(q, k, v, queries);
  if (!is_windowed && q.device().is_cpu()) {
    const at::Tensor q16 = in_autocast_type(q), k16 = in_autocast_type(k), v16 = in_autocast_type(v);
    if (can_use_flash_attention(q16, k16, v16)) return FlashAttentionFunction::apply(q16, k16, v16, queries);
  }
  return attention_in_blocks(q, k, v, queries, is_windowed ? window : 0);
}

}  // namespace phalanx::kernels
