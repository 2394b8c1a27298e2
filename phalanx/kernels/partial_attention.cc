#include "phalanx/kernels/partial_attention.h"

#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "phalanx/kernels/attention_layout.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/cpu_attention.h"

namespace phalanx::kernels {
namespace {

constexpr std::int64_t kRowsOfMask = 256;
constexpr double kNothing = -std::numeric_limits<double>::infinity();  // the log-sum-exp of no scores

bool is_16_bits(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

at::Tensor with_contiguous_heads(const at::Tensor& t) {
  return t.stride(-1) == 1 && t.stride(2) >= t.size(3) ? t : t.contiguous();
}

/// What one call of a kernel covers: some rows of the batch, queries and keys.
struct Tile {
  enum class Mask : std::uint8_t {
    none,    // every query sees every key
    causal,  // as many queries as keys, at the same positions
    band     // query i sees keys up to before + i, with a window only the last ones of these
  };
  std::int64_t row, rows, query, count, key, keys;
  Mask mask = Mask::none;
  std::int64_t before = 0;
  bool is_first = true;  // nothing else has attended from these queries

  at::Tensor queries_of(const at::Tensor& t) const { return t.narrow(0, row, rows).narrow(2, query, count); }
  at::Tensor keys_of(const at::Tensor& t) const { return t.narrow(0, row, rows).narrow(2, key, keys); }
  bool is_all_of(const at::Tensor& q, const at::Tensor& k) const {
    return rows == q.size(0) && count == q.size(2) && keys == k.size(2);
  }
};

std::vector<Tile> tiles_of(AttentionKernel kernel, const AttentionQueries& queries, std::int64_t rows) {
  std::vector<Tile> tiles;
  const std::int64_t window = queries.window;
  for_each_segment_of_rows(queries, rows, [&](std::int64_t row, std::int64_t count, const QuerySegment& s) {
    const auto add = [&](std::int64_t query, std::int64_t n, std::int64_t key, std::int64_t keys, Tile::Mask mask) {
      tiles.push_back({.row = row,
                       .rows = count,
                       .query = s.query + query,
                       .count = n,
                       .key = s.key + key,
                       .keys = keys,
                       .mask = mask,
                       .before = s.before + query - key});
    };
    const bool is_windowed = window > 0 && s.before + s.count > window;
    if (kernel == AttentionKernel::flash && is_windowed) {
      // Flash attention takes a limit behind the last key that is larger than the number of keys for another one. So
      // queries behind all keys stand alone: the first of them see every key.
      const std::int64_t own = std::clamp<std::int64_t>(s.keys - s.before, 0, s.count);
      const std::int64_t all = std::clamp<std::int64_t>(window - s.before - own, 0, s.count - own);
      if (own > 0) add(0, own, 0, std::min(s.keys, s.before + own), Tile::Mask::band);
      if (all > 0) add(own, all, 0, s.keys, Tile::Mask::none);
      if (own + all < s.count) add(own + all, s.count - own - all, 0, s.keys, Tile::Mask::band);
    } else if (kernel == AttentionKernel::operators || is_windowed) {
      const std::int64_t block = std::max(window, kRowsOfMask);
      for (std::int64_t first = 0; first < s.count; first += block) {
        const std::int64_t n = std::min(block, s.count - first), at = s.before + first;
        const std::int64_t from = window > 0 ? std::max<std::int64_t>(at + 1 - window, 0) : 0;
        add(first, n, from, std::min(at + n, s.keys) - from, Tile::Mask::band);
      }
    } else {
      const std::int64_t own =
          std::clamp<std::int64_t>(s.keys - s.before, 0, s.count);  // queries whose own key is here
      if (own > 0) add(0, own, s.before, own, Tile::Mask::causal);
      if (own > 0 && s.before > 0) {
        add(0, own, 0, s.before, Tile::Mask::none);
        tiles.back().is_first = false;
      }
      if (own < s.count) add(own, s.count - own, 0, s.keys, Tile::Mask::none);
    }
  });
  return tiles;
}

/// bool [queries, keys]
at::Tensor seen_in(const Tile& tile, std::int64_t window, at::Device device) {
  const auto integers = at::TensorOptions(at::kLong).device(device);
  const at::Tensor distance =
      at::arange(tile.before, tile.before + tile.count, integers).unsqueeze(1) - at::arange(tile.keys, integers);
  return window > 0 ? (distance >= 0) & (distance < window) : distance >= 0;
}

// --- whole rows of documents, by flash attention's cumulative lengths

bool are_whole_documents(AttentionKernel kernel, const AttentionQueries& queries) {
  return kernel == AttentionKernel::flash && queries.documents && !queries.keys && queries.ranges.size() == 1 &&
         queries.ranges[0].first == 0 && queries.ranges[0].count == queries.seq;
}

struct DocumentWindow {
  explicit DocumentWindow(std::int64_t window) {
    if (window == 0) return;
    left = window - 1;
    right = 0;
  }
  std::optional<std::int64_t> left, right;
};

AttentionPart attend_documents(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const AttentionQueries& queries) {
  const DocumentWindow window(queries.window);
  const at::Tensor& lengths = queries.documents->cumulative_lengths_on_device();
  const std::int64_t longest = queries.documents->longest(), batch = q.size(0);
  const auto results = at::_flash_attention_forward(
      as_tokens(q), as_tokens(k), as_tokens(v), lengths, lengths, longest, longest, /*dropout_p=*/0.0,
      /*is_causal=*/true, /*return_debug_mask=*/false, /*scale=*/std::nullopt, window.left, window.right);
  const at::Tensor& log_sums = std::get<1>(results);  // [heads, batch * seq]
  return {from_tokens(std::get<0>(results), batch),
          log_sums.unflatten(1, {batch, log_sums.size(1) / batch}).transpose(0, 1)};
}

AttentionGradients gradients_of_documents(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const AttentionPart& whole,
                                          const AttentionQueries& queries) {
  const DocumentWindow window(queries.window);
  const at::Tensor& lengths = queries.documents->cumulative_lengths_on_device();
  const std::int64_t longest = queries.documents->longest(), batch = q.size(0);
  // Without dropout the state of a generator is not read.
  const at::Tensor no_state = at::empty({2}, q.options().dtype(at::kLong));
  const auto [dq, dk, dv] = at::_flash_attention_backward(
      as_tokens(dy), as_tokens(q), as_tokens(k), as_tokens(v), as_tokens(whole.y),
      whole.log_sums.transpose(0, 1).flatten(1, 2).contiguous(), lengths, lengths, longest, longest, /*dropout_p=*/0.0,
      /*is_causal=*/true, no_state, no_state, /*scale=*/std::nullopt, window.left, window.right);
  return {from_tokens(dq, batch), from_tokens(dk, batch), from_tokens(dv, batch)};
}

// --- matrix products

/// Without autocast, which would round the sums.
struct Products {
  Products(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Tile& tile, std::int64_t window)
      : exact(q.device().type(), {.enabled = false}),
        kv_heads(k.size(1)),
        scale(1.0 / std::sqrt(static_cast<double>(q.size(3)))),
        query(grouped(q)),
        key(wide(k).unsqueeze(2)),
        value(wide(v).unsqueeze(2)),
        scores(at::matmul(query, key.transpose(-1, -2)).mul_(scale)) {
    if (tile.mask != Tile::Mask::none) scores.masked_fill_(seen_in(tile, window, q.device()).logical_not(), kNothing);
  }
  static at::Tensor wide(const at::Tensor& t) { return t.to(sum_type(t.scalar_type())); }
  /// [rows, kv_heads, heads that share one, queries, ...]
  at::Tensor grouped(const at::Tensor& t) const { return wide(t).unflatten(1, {kv_heads, t.size(1) / kv_heads}); }

  AutocastScope exact;
  std::int64_t kv_heads;
  double scale;
  at::Tensor query, key, value, scores;
};

AttentionPart attend_by_products(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Tile& tile,
                                 std::int64_t window) {
  const Products p(q, k, v, tile, window);
  const at::Tensor log_sums = at::logsumexp(p.scores, {-1});
  const at::Tensor y = at::matmul((p.scores - log_sums.unsqueeze(-1)).exp_(), p.value);
  return {y.flatten(1, 2), log_sums.flatten(1, 2)};
}

AttentionGradients gradients_by_products(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const AttentionPart& whole, const Tile& tile,
                                         std::int64_t window) {
  const Products p(q, k, v, tile, window);
  const at::Tensor grad = p.grouped(dy), dot = (grad * p.grouped(whole.y)).sum(-1, /*keepdim=*/true);
  const at::Tensor probability = (p.scores - p.grouped(whole.log_sums).unsqueeze(-1)).exp_();
  const at::Tensor dscores = (at::matmul(grad, p.value.transpose(-1, -2)) - dot).mul_(probability).mul_(p.scale);
  return {at::matmul(dscores, p.key).flatten(1, 2), at::matmul(dscores.transpose(-1, -2), p.query).sum(2),
          at::matmul(probability.transpose(-1, -2), grad).sum(2)};
}

// --- ATen's kernels. Those of devices take [batch, seq, heads, head_dim].

at::Tensor tokens_first(const at::Tensor& t) { return t.transpose(1, 2); }

std::optional<at::Tensor> added_mask(const Tile& tile, std::int64_t window, const at::Tensor& q) {
  if (tile.mask != Tile::Mask::band) return std::nullopt;
  return at::zeros({tile.count, tile.keys}, q.options())
      .masked_fill_(seen_in(tile, window, q.device()).logical_not(), kNothing);
}

/// Flash attention counts a window from the last query and the last key.
struct FlashWindow {
  FlashWindow(const Tile& tile, std::int64_t window) {
    if (tile.mask != Tile::Mask::band) return;
    right = tile.before + tile.count - tile.keys;
    left = window - 1 - *right;
  }
  std::optional<std::int64_t> left, right;
};

/// Memory-efficient attention knows no groups of heads.
struct HeadGroups {
  std::int64_t group;
  at::Tensor expanded(const at::Tensor& t) const { return group == 1 ? t : t.repeat_interleave(group, 2); }
  at::Tensor summed(const at::Tensor& t) const {
    return group == 1 ? t : t.unflatten(2, {t.size(2) / group, group}).sum(3);
  }
};
constexpr std::int64_t kLogSumRows = 32;  // of memory-efficient attention: its log-sums are a multiple of these
std::int64_t mask_type(const Tile& tile) { return tile.mask == Tile::Mask::causal ? 1 : 0; }

AttentionPart attend_tile(AttentionKernel kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const Tile& tile, std::int64_t window) {
  const bool is_causal = tile.mask == Tile::Mask::causal;
  if (kernel == AttentionKernel::cpu_16_bits) {
    auto [y, log_sums] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout_p=*/0.0, is_causal,
                                                                         added_mask(tile, window, q));
    return {std::move(y), std::move(log_sums)};
  }
  if (kernel == AttentionKernel::flash) {
    const FlashWindow band(tile, window);
    const auto results = at::_flash_attention_forward(
        tokens_first(q), tokens_first(k), tokens_first(v), /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, tile.count, tile.keys,
        /*dropout_p=*/0.0, is_causal, /*return_debug_mask=*/false, /*scale=*/std::nullopt, band.left, band.right);
    return {tokens_first(std::get<0>(results)), std::get<1>(results)};
  }
  if (kernel == AttentionKernel::efficient && tile.mask != Tile::Mask::band) {
    const HeadGroups heads{q.size(1) / k.size(1)};
    const auto results = at::_efficient_attention_forward(
        tokens_first(q), heads.expanded(tokens_first(k)), heads.expanded(tokens_first(v)), /*bias=*/{},
        /*cu_seqlens_q=*/{}, /*cu_seqlens_k=*/{}, /*max_seqlen_q=*/std::nullopt, /*max_seqlen_k=*/std::nullopt,
        /*dropout_p=*/0.0, mask_type(tile), /*compute_log_sumexp=*/true);
    return {tokens_first(std::get<0>(results)), std::get<1>(results).narrow(2, 0, tile.count)};
  }
  return attend_by_products(q, k, v, tile, window);
}

AttentionGradients gradients_of_tile(AttentionKernel kernel, const at::Tensor& dy, const at::Tensor& q,
                                     const at::Tensor& k, const at::Tensor& v, const AttentionPart& whole,
                                     const Tile& tile, std::int64_t window) {
  const bool is_causal = tile.mask == Tile::Mask::causal;
  if (kernel == AttentionKernel::cpu_16_bits) {
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        dy, q, k, v, whole.y, whole.log_sums.contiguous(), /*dropout_p=*/0.0, is_causal, added_mask(tile, window, q));
    return {std::move(dq), std::move(dk), std::move(dv)};
  }
  if (kernel == AttentionKernel::flash) {
    const FlashWindow band(tile, window);
    // Without dropout the state of a generator is not read.
    const at::Tensor no_state = at::empty({2}, q.options().dtype(at::kLong));
    const auto [dq, dk, dv] = at::_flash_attention_backward(
        tokens_first(dy), tokens_first(q), tokens_first(k), tokens_first(v), tokens_first(whole.y),
        whole.log_sums.contiguous(), /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, tile.count, tile.keys, /*dropout_p=*/0.0,
        is_causal, no_state, no_state, /*scale=*/std::nullopt, band.left, band.right);
    return {tokens_first(dq), tokens_first(dk), tokens_first(dv)};
  }
  if (kernel == AttentionKernel::efficient && tile.mask != Tile::Mask::band) {
    const HeadGroups heads{q.size(1) / k.size(1)};
    const std::int64_t padded = (tile.count + kLogSumRows - 1) / kLogSumRows * kLogSumRows;
    at::Tensor log_sums = whole.log_sums.contiguous();
    if (padded != tile.count) {
      log_sums = at::full({q.size(0), q.size(1), padded}, -kNothing, log_sums.options());
      log_sums.narrow(2, 0, tile.count).copy_(whole.log_sums);
    }
    const at::Tensor no_state = at::empty({}, q.options().dtype(at::kLong));
    const auto results = at::_efficient_attention_backward(
        tokens_first(dy), tokens_first(q), heads.expanded(tokens_first(k)), heads.expanded(tokens_first(v)),
        /*bias=*/{}, tokens_first(whole.y), /*cu_seqlens_q=*/{}, /*cu_seqlens_k=*/{}, tile.count, tile.keys, log_sums,
        /*dropout_p=*/0.0, no_state, no_state, mask_type(tile), /*bias_requires_grad=*/false);
    return {tokens_first(std::get<0>(results)), tokens_first(heads.summed(std::get<1>(results))),
            tokens_first(heads.summed(std::get<2>(results)))};
  }
  return gradients_by_products(dy, q, k, v, whole, tile, window);
}

}  // namespace

at::Tensor empty_heads_like(const at::Tensor& t, at::ScalarType type) {
  return at::empty({t.size(0), t.size(2), t.size(1), t.size(3)}, t.options().dtype(type)).transpose(1, 2);
}

AttentionKernel device_kernel_for(at::ScalarType type, std::int64_t head_dim) {
  if (is_16_bits(type) && head_dim % 8 == 0 && head_dim <= 256) return AttentionKernel::flash;
  return type == at::kFloat && head_dim % 4 == 0 ? AttentionKernel::efficient : AttentionKernel::operators;
}

AttentionKernel attention_kernel_for(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const at::ScalarType type = q.scalar_type();
  if (k.scalar_type() != type || v.scalar_type() != type || q.numel() == 0) return AttentionKernel::operators;
  if (!q.device().is_cpu()) return device_kernel_for(type, q.size(3));
  if (type == at::kFloat && has_cpu_attention()) return AttentionKernel::cpu;
  const bool is_flash = is_16_bits(type) && at::_fused_sdp_choice(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                                  /*is_causal=*/true, /*scale=*/std::nullopt,
                                                                  /*enable_gqa=*/q.size(1) != k.size(1)) ==
                                                static_cast<std::int64_t>(at::SDPBackend::flash_attention);
  return is_flash ? AttentionKernel::cpu_16_bits : AttentionKernel::operators;
}

AttentionPart attend(AttentionKernel kernel, const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                     const AttentionQueries& queries) {
  const at::Tensor q = with_contiguous_heads(q_in), k = with_contiguous_heads(k_in), v = with_contiguous_heads(v_in);
  const at::ScalarType type = sum_type(q.scalar_type());
  const auto nothing = [&] {
    return AttentionPart{.y = empty_heads_like(q, type).zero_(),
                         .log_sums = at::full({q.size(0), q.size(1), q.size(2)}, kNothing, q.options().dtype(type))};
  };
  if (kernel == AttentionKernel::cpu) {
    std::int64_t attended = 0;
    for_each_segment_of_rows(queries, q.size(0), [&](std::int64_t, std::int64_t rows, const QuerySegment& s) {
      attended += rows * s.count;
    });
    const bool all = attended == q.size(0) * q.size(2);
    AttentionPart part =
        all ? AttentionPart{empty_heads_like(q, type), at::empty({q.size(0), q.size(1), q.size(2)}, q.options())}
            : nothing();
    cpu_attention(q, k, v, queries, part.y, part.log_sums);
    return part;
  }
  if (are_whole_documents(kernel, queries)) return attend_documents(q, k, v, queries);
  const std::vector<Tile> tiles = tiles_of(kernel, queries, q.size(0));
  if (tiles.size() == 1 && tiles[0].is_all_of(q, k)) return attend_tile(kernel, q, k, v, tiles[0], queries.window);
  AttentionPart sum = nothing();
  for (const Tile& tile : tiles) {
    const AttentionPart part =
        attend_tile(kernel, tile.queries_of(q), tile.keys_of(k), tile.keys_of(v), tile, queries.window);
    const AttentionPart to{tile.queries_of(sum.y), tile.queries_of(sum.log_sums)};
    if (tile.is_first) {
      to.y.copy_(part.y);
      to.log_sums.copy_(part.log_sums);
    } else {
      merge_into(to, part);
    }
  }
  return sum;
}

void merge_into(const AttentionPart& sum, const AttentionPart& part) {
  const at::Tensor both = at::logaddexp(sum.log_sums, part.log_sums);
  const auto share = [&](const at::Tensor& log_sums) { return (log_sums - both).exp_().unsqueeze(-1); };
  sum.y.mul_(share(sum.log_sums)).addcmul_(part.y.to(sum.y.scalar_type()), share(part.log_sums));
  sum.log_sums.copy_(both);
}

AttentionGradients attention_gradients(AttentionKernel kernel, const at::Tensor& dy_in, const at::Tensor& q_in,
                                       const at::Tensor& k_in, const at::Tensor& v_in, const AttentionPart& whole,
                                       const AttentionQueries& queries, const AttentionGradients& into) {
  const at::Tensor q = with_contiguous_heads(q_in), k = with_contiguous_heads(k_in), v = with_contiguous_heads(v_in);
  const at::Tensor dy = with_contiguous_heads(dy_in);
  const at::ScalarType type = sum_type(q.scalar_type());
  const auto made = [&](const at::Tensor& t, const at::Tensor& like) {
    return t.defined() ? t : empty_heads_like(like, type);
  };
  if (kernel == AttentionKernel::cpu) {
    AttentionGradients grads{made(into.dq, q), made(into.dk, k), made(into.dv, v)};
    cpu_attention_backward(dy, q, k, v, whole.y, whole.log_sums, queries, grads.dq, into.dq.defined(), grads.dk,
                           grads.dv);
    return grads;
  }
  const bool is_fresh = !into.dq.defined() && !into.dk.defined() && !into.dv.defined();
  if (is_fresh && are_whole_documents(kernel, queries)) return gradients_of_documents(dy, q, k, v, whole, queries);
  const std::vector<Tile> tiles = tiles_of(kernel, queries, q.size(0));
  const bool is_one = tiles.size() == 1 && tiles[0].is_all_of(q, k);
  if (is_one && is_fresh) {
    return gradients_of_tile(kernel, dy, q, k, v, whole, tiles[0], queries.window);
  }
  AttentionGradients grads{made(into.dq, q), made(into.dk, k), made(into.dv, v)};
  if (!into.dq.defined()) grads.dq.zero_();
  grads.dk.zero_();
  grads.dv.zero_();
  for (const Tile& tile : tiles) {
    const AttentionPart of_tile{tile.queries_of(whole.y), tile.queries_of(whole.log_sums)};
    const AttentionGradients part = gradients_of_tile(kernel, tile.queries_of(dy), tile.queries_of(q), tile.keys_of(k),
                                                      tile.keys_of(v), of_tile, tile, queries.window);
    tile.queries_of(grads.dq).add_(part.dq);
    tile.keys_of(grads.dk).add_(part.dk);
    tile.keys_of(grads.dv).add_(part.dv);
  }
  return grads;
}

}  // namespace phalanx::kernels
