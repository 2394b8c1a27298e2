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
#include <ATen/ops/scaled_dot_product_attention.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
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
struct KeptDocuments : torch::CustomClassHolder {
  explicit KeptDocuments(Documents kept) : documents(std::move(kept)) {}
  Documents documents;
};

void keep(torch::autograd::AutogradContext& ctx, const Documents& documents) {
  ctx.saved_data["documents"] = c10::IValue::make_capsule(c10::make_intrusive<KeptDocuments>(documents));
}
Documents kept_documents(torch::autograd::AutogradContext& ctx) {
  return static_cast<KeptDocuments&>(*ctx.saved_data["documents"].toCapsule()).documents;
}

/// Calls use(first token within the row, number of tokens) for each document of a row of `seq` tokens.
template <class Use>
void for_each_document(const Documents& documents, std::int64_t row, std::int64_t seq, const Use& use) {
  if (!documents) return use(0, seq);
  const auto ends = documents->of_row(row);
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    use(ends[i] - row * seq, static_cast<std::int64_t>(ends[i + 1]) - ends[i]);
  }
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
                               const Documents& documents) {
  const std::int64_t batch = q.size(0), heads = q.size(1), seq = q.size(2), dim = q.size(3);
  const std::int64_t group = heads / k.size(1);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const at::Tensor y = empty_heads_like(q), log_sums = at::empty({batch, heads, seq}, q.options());
  float* log_sum = log_sums.mutable_data_ptr<float>();
  at::parallel_for(0, batch * heads, 1, [&](std::int64_t from, std::int64_t to) {
    std::vector<float> scores(static_cast<std::size_t>(kQueryBlock * longest_of(documents, seq)));
    for (std::int64_t task = from; task < to; ++task) {
      const std::int64_t b = task / heads, h = task % heads;
      const auto query = head_of(q, b, h), key = head_of(k, b, h / group), value = head_of(v, b, h / group);
      const auto out = mutable_head_of(y, b, h);
      for_each_document(documents, b, seq, [&](std::int64_t begin, std::int64_t length) {
        for (std::int64_t first = 0; first < length; first += kQueryBlock) {
          const std::int64_t n = std::min(kQueryBlock, length - first), seen = first + n, at = begin + first;
          multiply(n, seen, dim, scale, query.rows(at), key.rows(begin).transposed(), 0.0f, scores.data(), seen);
          row_kernels().causal_softmax(n, seen, first, scores.data(), log_sum + task * seq + at);
          multiply(n, dim, seen, 1.0f, {scores.data(), seen}, value.rows(begin), 0.0f, out.data + at * out.stride,
                   out.stride);
        }
      });
    }
  });
  return {y, log_sums};
}

struct CausalAttentionFunction : torch::autograd::Function<CausalAttentionFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q_in, const at::Tensor& k_in,
                            const at::Tensor& v_in, const Documents& documents) {
    const at::Tensor q = with_contiguous_heads(q_in), k = with_contiguous_heads(k_in), v = with_contiguous_heads(v_in);
    const auto outputs = computed_once(SavedOp::attention, [&] { return attend(q, k, v, documents); });
    const at::Tensor &y = outputs[0], &log_sums = outputs[1];
    ctx->save_for_backward({q, k, v, log_sums});
    keep(*ctx, documents);
    ctx->saved_data["y"] = y.detach();  // values for the backward pass, outside the graph
    return y;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &log_sums = saved[3];
    const at::Tensor y = ctx->saved_data["y"].toTensor(), dy = with_contiguous_heads(grads[0]);
    const Documents documents = kept_documents(*ctx);
    const std::int64_t batch = q.size(0), heads = q.size(1), kv_heads = k.size(1), seq = q.size(2), dim = q.size(3);
    const std::int64_t group = heads / kv_heads;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const at::Tensor dq = empty_heads_like(q), dk = empty_heads_like(k), dv = empty_heads_like(v);
    // One task owns a key head with all the query heads that share it, so its sums have one order.
    at::parallel_for(0, batch * kv_heads, 1, [&](std::int64_t from, std::int64_t to) {
      std::vector<float> p(static_cast<std::size_t>(kQueryBlock * longest_of(documents, seq))), dp(p.size());
      for (std::int64_t task = from; task < to; ++task) {
        const std::int64_t b = task / kv_heads, kv = task % kv_heads;
        const auto key = head_of(k, b, kv), value = head_of(v, b, kv);
        const auto dkey = mutable_head_of(dk, b, kv), dvalue = mutable_head_of(dv, b, kv);
        for (const auto& sum : {dkey, dvalue}) {
          for (std::int64_t t = 0; t < seq; ++t) std::fill_n(sum.data + t * sum.stride, dim, 0.0f);
        }
        for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
          const auto query = head_of(q, b, h), out = head_of(y, b, h), dout = head_of(dy, b, h);
          const auto dquery = mutable_head_of(dq, b, h);
          const float* log_sum = log_sums.const_data_ptr<float>() + (b * heads + h) * seq;
          for_each_document(documents, b, seq, [&](std::int64_t begin, std::int64_t length) {
            float *dvalues = dvalue.data + begin * dvalue.stride, *dkeys = dkey.data + begin * dkey.stride;
            for (std::int64_t first = 0; first < length; first += kQueryBlock) {
              const std::int64_t n = std::min(kQueryBlock, length - first), seen = first + n, at = begin + first;
              const Matrix probability = {p.data(), seen}, dscore = {dp.data(), seen};
              multiply(n, seen, dim, scale, query.rows(at), key.rows(begin).transposed(), 0.0f, p.data(), seen);
              multiply(n, seen, dim, 1.0f, dout.rows(at), value.rows(begin).transposed(), 0.0f, dp.data(), seen);
              row_kernels().causal_softmax_backward(n, seen, first, dim, scale, log_sum + at,
                                                    out.data + at * out.stride, out.stride,
                                                    dout.data + at * dout.stride, dout.stride, p.data(), dp.data());
              multiply(seen, dim, n, 1.0f, probability.transposed(), dout.rows(at), 1.0f, dvalues, dvalue.stride);
              multiply(seen, dim, n, 1.0f, dscore.transposed(), query.rows(at), 1.0f, dkeys, dkey.stride);
              multiply(n, dim, seen, 1.0f, dscore, key.rows(begin), 0.0f, dquery.data + at * dquery.stride,
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
struct FlashAttentionFunction : torch::autograd::Function<FlashAttentionFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const Documents& documents) {
    const auto outputs = computed_once(SavedOp::attention, [&] { return attend(q, k, v, documents); });
    torch::autograd::variable_list saved = {q, k, v};
    saved.insert(saved.end(), outputs.begin() + 1, outputs.end());
    ctx->save_for_backward(saved);
    keep(*ctx, documents);
    ctx->saved_data["y"] = outputs[0].detach();  // values for the backward pass, outside the graph
    return outputs[0];
  }

  /// The output, then the log-sum-exp of each document in turn.
  static std::vector<at::Tensor> attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const Documents& documents) {
    if (!documents) {
      auto [y, log_sums] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout_p=*/0.0,
                                                                           /*is_causal=*/true);
      return {std::move(y), std::move(log_sums)};
    }
    std::vector<at::Tensor> outputs = {empty_heads_like(q)};
    for (std::int64_t row = 0; row < q.size(0); ++row) {
      for_each_document(documents, row, q.size(2), [&](std::int64_t first, std::int64_t count) {
        const auto of = [&](const at::Tensor& t) { return document_of(t, row, first, count); };
        auto [y, log_sums] = at::_scaled_dot_product_flash_attention_for_cpu(of(q), of(k), of(v), /*dropout_p=*/0.0,
                                                                             /*is_causal=*/true);
        of(outputs[0]).copy_(y);
        outputs.push_back(std::move(log_sums));
      });
    }
    return outputs;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], y = ctx->saved_data["y"].toTensor();
    const Documents documents = kept_documents(*ctx);
    if (!documents) {
      auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          grads[0], q, k, v, y, saved[3], /*dropout_p=*/0.0, /*is_causal=*/true);
      return {std::move(dq), std::move(dk), std::move(dv), at::Tensor()};
    }
    const at::Tensor dq = empty_heads_like(q), dk = empty_heads_like(k), dv = empty_heads_like(v);
    std::size_t number = 3;
    for (std::int64_t row = 0; row < q.size(0); ++row) {
      for_each_document(documents, row, q.size(2), [&](std::int64_t first, std::int64_t count) {
        const auto of = [&](const at::Tensor& t) { return document_of(t, row, first, count); };
        const auto [dq_part, dk_part, dv_part] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
            of(grads[0]), of(q), of(k), of(v), of(y), saved[number++], /*dropout_p=*/0.0, /*is_causal=*/true);
        of(dq).copy_(dq_part);
        of(dk).copy_(dk_part);
        of(dv).copy_(dv_part);
      });
    }
    return {dq, dk, dv, at::Tensor()};
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
  if (whole && sgemm_ != nullptr && fusible(q, k, v)) return CausalAttentionFunction::apply(q, k, v, documents);
  if (whole && q.device().is_cpu()) {
    const at::Tensor q16 = in_autocast_type(q), k16 = in_autocast_type(k), v16 = in_autocast_type(v);
    if (can_use_flash_attention(q16, k16, v16)) return FlashAttentionFunction::apply(q16, k16, v16, documents);
  }
  if (!documents) return causal_attention_reference(q, k, v);
  return each_document(q, k, v, documents, [](const at::Tensor& q_of, const at::Tensor& k_of, const at::Tensor& v_of) {
    return causal_attention_reference(q_of, k_of, v_of);
  });
}

}  // namespace phalanx::kernels
