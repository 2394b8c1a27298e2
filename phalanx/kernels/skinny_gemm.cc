#include "phalanx/kernels/skinny_gemm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "phalanx/kernels/fusible.h"
#include "phalanx/kernels/row_kernels.h"

namespace phalanx::kernels {
namespace {

constexpr std::int64_t kGrain = 1 << 16;  // minimum multiply-adds per thread

bool has_contiguous_heads(const at::Tensor& t) { return t.dim() == 4 && t.stride(3) == 1; }

}  // namespace

bool can_use_skinny_gemm(const at::Tensor& x, const at::Tensor& weight) {
  if (!fusible(x, weight) || x.dim() < 1 || weight.dim() != 2 || !weight.is_contiguous()) return false;
  if (!c10::InferenceMode::is_enabled()) return false;
  const std::int64_t in = weight.size(1);
  return in > 0 && x.size(-1) == in && x.numel() > 0 && x.numel() <= kSkinnyGemmRows * in;
}

at::Tensor skinny_gemm(const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor rows = x.contiguous();
  const std::int64_t in = weight.size(1), outs = weight.size(0), count = rows.numel() / in;
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape.back() = outs;
  at::Tensor y = at::empty(shape, x.options());
  const float *from = rows.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  at::parallel_for(0, outs, std::max<std::int64_t>(1, kGrain / in), [&](std::int64_t begin, std::int64_t end) {
    row_kernels().row_products(count, end - begin, in, from, in, w + begin * in, in, to + begin, outs);
  });
  return y;
}

bool can_use_decode_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values) {
  return fusible(q, keys, values) && has_contiguous_heads(q) && q.size(2) == 1 && has_contiguous_heads(keys) &&
         has_contiguous_heads(values) && keys.size(1) > 0 && q.size(1) % keys.size(1) == 0;
}

at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            std::span<const std::int64_t> seen, std::int64_t window, const at::Tensor& sinks) {
  const std::int64_t batch = q.size(0), heads = q.size(1), dim = q.size(3), kv_heads = keys.size(1);
  const std::int64_t group = heads / kv_heads, longest = *std::ranges::max_element(seen);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  at::Tensor y = at::empty({batch, 1, heads, dim}, q.options()).transpose(1, 2);
  const float *query = q.const_data_ptr<float>(), *key = keys.const_data_ptr<float>();
  const float* value = values.const_data_ptr<float>();
  const at::Tensor sink_row = sinks.defined() ? sinks.to(at::kFloat).contiguous() : sinks;
  const float* sink = sinks.defined() ? sink_row.const_data_ptr<float>() : nullptr;
  float* out = y.mutable_data_ptr<float>();
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / (2 * group * longest * dim));
  at::parallel_for(0, batch * kv_heads, grain, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scores(static_cast<std::size_t>(group * longest));
    float log_sum = 0;
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t b = task / kv_heads, h = task % kv_heads, all = seen[static_cast<std::size_t>(b)];
      const std::int64_t count = window > 0 ? std::min(window, all) : all, first = all - count;
      row_kernels().row_products(group, count, dim, query + b * q.stride(0) + h * group * q.stride(1), q.stride(1),
                                 key + b * keys.stride(0) + h * keys.stride(1) + first * keys.stride(2), keys.stride(2),
                                 scores.data(), count);
      for (float& score : std::span(scores).first(static_cast<std::size_t>(group * count))) score *= scale;
      for (std::int64_t g = 0; g < group; ++g) {
        row_kernels().causal_softmax(1, count, count - 1, /*window=*/0, scores.data() + g * count, &log_sum);
        if (sink == nullptr) continue;
        const float share = 1.0f / (1.0f + std::exp(sink[h * group + g] - log_sum));  // of the keys
        for (float& score :
             std::span(scores).subspan(static_cast<std::size_t>(g * count), static_cast<std::size_t>(count))) {
          score *= share;
        }
      }
      row_kernels().weighted_sums(group, count, dim, scores.data(), count,
                                  value + b * values.stride(0) + h * values.stride(1) + first * values.stride(2),
                                  values.stride(2), out + b * y.stride(0) + h * group * y.stride(1), y.stride(1));
    }
  });
  return y;
}

}  // namespace phalanx::kernels
