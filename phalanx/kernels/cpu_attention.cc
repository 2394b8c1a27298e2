#include "phalanx/kernels/cpu_attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "phalanx/kernels/row_kernels.h"

// libtorch's own BLAS, called without the dispatcher: a block's products take 25 us, a dispatched op takes several.
// Declared weak, because not every build of libtorch exports it.
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
  Matrix rows(std::int64_t first) const { return {at(first), stride}; }
  Float* at(std::int64_t position) const { return data + position * stride; }
};
Head<const float> head_of(const at::Tensor& t, std::int64_t batch, std::int64_t head) {
  return {t.const_data_ptr<float>() + batch * t.stride(0) + head * t.stride(1), t.stride(2)};
}
Head<float> mutable_head_of(const at::Tensor& t, std::int64_t batch, std::int64_t head) {
  return {t.mutable_data_ptr<float>() + batch * t.stride(0) + head * t.stride(1), t.stride(2)};
}

/// Some queries of a segment, and the keys that they see.
struct Block {
  std::int64_t query, count, key, keys;
  std::int64_t unmasked;  // keys before that of the first query
};

template <class Use>
void for_each_block(const AttentionQueries& queries, std::int64_t row, const Use& use) {
  for_each_segment(queries, row, [&](const QuerySegment& s) {
    for (std::int64_t first = 0; first < s.count; first += kQueryBlock) {
      const std::int64_t n = std::min(kQueryBlock, s.count - first), at = s.before + first;
      const std::int64_t from = queries.window > 0 ? std::max<std::int64_t>(at + 1 - queries.window, 0) : 0;
      use(Block{.query = s.query + first,
                .count = n,
                .key = s.key + from,
                .keys = std::min(at + n, s.keys) - from,
                .unmasked = at - from});
    }
  });
}

}  // namespace

bool has_cpu_attention() { return sgemm_ != nullptr; }

void cpu_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionQueries& queries,
                   const at::Tensor& y, const at::Tensor& log_sums) {
  const std::int64_t batch = q.size(0), heads = q.size(1), seq = q.size(2), dim = q.size(3);
  const std::int64_t group = heads / k.size(1);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  float* log_sum = log_sums.mutable_data_ptr<float>();
  at::parallel_for(0, batch * heads, 1, [&](std::int64_t from, std::int64_t to) {
    std::vector<float> scores(static_cast<std::size_t>(kQueryBlock * queries.widest(kQueryBlock)));
    for (std::int64_t task = from; task < to; ++task) {
      const std::int64_t b = task / heads, h = task % heads;
      const auto query = head_of(q, b, h), key = head_of(k, b, h / group), value = head_of(v, b, h / group);
      const auto out = mutable_head_of(y, b, h);
      for_each_block(queries, b, [&](const Block& block) {
        const std::int64_t n = block.count, seen = block.keys;
        multiply(n, seen, dim, scale, query.rows(block.query), key.rows(block.key).transposed(), 0.0f, scores.data(),
                 seen);
        row_kernels().causal_softmax(n, seen, block.unmasked, queries.window, scores.data(),
                                     log_sum + task * seq + block.query);
        multiply(n, dim, seen, 1.0f, {scores.data(), seen}, value.rows(block.key), 0.0f, out.at(block.query),
                 out.stride);
      });
    }
  });
}

void cpu_attention_backward(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& y, const at::Tensor& log_sums, const AttentionQueries& queries,
                            const at::Tensor& dq, bool adds_to_dq, const at::Tensor& dk, const at::Tensor& dv) {
  const std::int64_t batch = q.size(0), heads = q.size(1), kv_heads = k.size(1), dim = q.size(3);
  const std::int64_t group = heads / kv_heads, keys = k.size(2);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  // One task owns a key head with all the query heads that share it, so its sums have one order.
  at::parallel_for(0, batch * kv_heads, 1, [&](std::int64_t from, std::int64_t to) {
    std::vector<float> p(static_cast<std::size_t>(kQueryBlock * queries.widest(kQueryBlock))), dp(p.size());
    for (std::int64_t task = from; task < to; ++task) {
      const std::int64_t b = task / kv_heads, kv = task % kv_heads;
      const auto key = head_of(k, b, kv), value = head_of(v, b, kv);
      const auto dkey = mutable_head_of(dk, b, kv), dvalue = mutable_head_of(dv, b, kv);
      for (const auto& sum : {dkey, dvalue}) {
        for (std::int64_t t = 0; t < keys; ++t) std::fill_n(sum.at(t), dim, 0.0f);
      }
      for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        const auto query = head_of(q, b, h), out = head_of(y, b, h), dout = head_of(dy, b, h);
        const auto dquery = mutable_head_of(dq, b, h);
        const float* log_sum = log_sums.const_data_ptr<float>() + b * log_sums.stride(0) + h * log_sums.stride(1);
        for_each_block(queries, b, [&](const Block& block) {
          const std::int64_t n = block.count, seen = block.keys, at = block.query;
          const Matrix probability = {p.data(), seen}, dscore = {dp.data(), seen};
          multiply(n, seen, dim, scale, query.rows(at), key.rows(block.key).transposed(), 0.0f, p.data(), seen);
          multiply(n, seen, dim, 1.0f, dout.rows(at), value.rows(block.key).transposed(), 0.0f, dp.data(), seen);
          row_kernels().causal_softmax_backward(n, seen, block.unmasked, queries.window, dim, scale, log_sum + at,
                                                out.at(at), out.stride, dout.at(at), dout.stride, p.data(), dp.data());
          multiply(seen, dim, n, 1.0f, probability.transposed(), dout.rows(at), 1.0f, dvalue.at(block.key),
                   dvalue.stride);
          multiply(seen, dim, n, 1.0f, dscore.transposed(), query.rows(at), 1.0f, dkey.at(block.key), dkey.stride);
          multiply(n, dim, seen, 1.0f, dscore, key.rows(block.key), adds_to_dq ? 1.0f : 0.0f, dquery.at(at),
                   dquery.stride);
        });
      }
    }
  });
}

}  // namespace phalanx::kernels
