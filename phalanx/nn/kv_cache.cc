#include "phalanx/nn/kv_cache.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "phalanx/base/error.h"

namespace phalanx::nn {

KvCache::KvCache(const KvCacheOptions& options)
    : options_(options), lengths_(static_cast<std::size_t>(options.batch), 0) {
  const auto tensor = at::TensorOptions(options.dtype).device(options.device);
  for (std::int64_t layer = 0; layer < options.layers; ++layer) {
    for (auto* buffers : {&keys_, &values_}) {
      // Zeros, not garbage: a masked position still enters a product with weight 0, and 0 * NaN would be NaN.
      buffers->push_back(
          is_on_device()
              ? at::zeros({options.batch, options.max_len, options.kv_heads, options.head_dim}, tensor).transpose(1, 2)
              : at::zeros({options.batch, options.kv_heads, options.max_len, options.head_dim}, tensor));
    }
  }
  if (!is_on_device()) return;
  first_query_ = at::arange(options.batch + 1, at::TensorOptions(at::kInt).device(options.device));
  first_keys_ = first_query_ * options.max_len;
}

std::int64_t KvCache::longest() const noexcept {
  return lengths_.empty() ? 0 : *std::max_element(lengths_.begin(), lengths_.end());
}

std::int64_t KvCache::bytes() const noexcept {
  std::int64_t sum = 0;
  for (const auto& k : keys_) sum += 2 * static_cast<std::int64_t>(k.nbytes());
  return sum;
}

void KvCache::begin(std::int64_t tokens, std::vector<std::int64_t> counts, std::int64_t first_row) {
  if (counts.empty()) counts.assign(lengths_.size(), tokens);
  if (first_row < 0 || first_row + std::ssize(counts) > std::ssize(lengths_)) {
    throw Error(fmt::format("{} token counts were given for a cache of {} rows, from row {} on", counts.size(),
                            lengths_.size(), first_row));
  }
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const std::size_t r = i + static_cast<std::size_t>(first_row);
    if (counts[i] < 0 || counts[i] > tokens) {
      throw Error(
          fmt::format("row {}: {} real tokens out of {} given: expected 0 to {}", r, counts[i], tokens, tokens));
    }
    // The padding is written too, so it must fit as well.
    if (lengths_[r] + tokens > options_.max_len) {
      throw Error(
          fmt::format("the key-value cache is full: row {} holds {} tokens and {} more do not fit its {} positions; "
                      "make the cache longer or generate fewer tokens",
                      r, lengths_[r], tokens, options_.max_len));
    }
  }
  tokens_ = tokens;
  first_row_ = first_row;
  counts_ = std::move(counts);
  const auto held = lengths_.begin() + first_row;
  seen_.assign(held, held + std::ssize(counts_));
  const auto [shortest, longest] = std::ranges::minmax(seen_);
  start_ = longest;
  same_ = shortest == longest;
  for (auto& n : seen_) n += tokens;
  positions_ = places_ = at::Tensor();
  masks_.clear();
  on_device_.reset();
  if (same_) return;
  const at::TensorOptions integers = at::TensorOptions(at::kLong);
  const at::Tensor behind = at::tensor(seen_, integers).unsqueeze(1) - tokens;
  positions_ = (behind + at::arange(tokens, integers)).to(options_.device);  // [rows, tokens]
  if (!is_on_device()) return;
  const std::int64_t rows = std::ssize(seen_);
  const at::Tensor firsts = first_keys_.narrow(0, 0, rows);
  places_ = (positions_ + firsts.unsqueeze(1)).flatten();
  if (tokens != 1) return;
  on_device_ = {.seen = (positions_.flatten() + 1).to(at::kInt),
                .first_keys = first_keys_.narrow(0, 0, rows + 1),
                .first_query = first_query_.narrow(0, 0, rows + 1)};
}

const at::Tensor& KvCache::mask(std::int64_t window) {
  const bool beyond_window = window > 0 && start_ + tokens_ > window;
  const auto [found, is_new] = masks_.try_emplace(beyond_window ? window : 0);
  at::Tensor& mask = found->second;
  if (!is_new || (same_ && !beyond_window && tokens_ == 1)) return mask;
  const at::TensorOptions integers = at::TensorOptions(at::kLong).device(options_.device);
  const at::Tensor positions = positions_.defined() ? positions_ : at::arange(start_, start_ + tokens_, integers);
  const at::Tensor keys = at::arange(start_ + tokens_, integers);
  const at::Tensor distance = positions.unsqueeze(-1) - keys;  // [rows or none, tokens, keys]
  const at::Tensor visible = beyond_window ? (distance >= 0) & (distance < window) : distance >= 0;
  mask = visible.view({-1, 1, tokens_, start_ + tokens_}).expand({std::ssize(seen_), 1, -1, -1});
  return mask;
}

namespace {

/// On the host, rows are copied one by one, without a dispatched operation for each.
void copy_heads(const at::Tensor& from, const at::Tensor& to, const std::vector<std::int64_t>& places) {
  const std::int64_t rows = from.size(0), heads = from.size(1), tokens = from.size(2);
  const auto size = static_cast<std::int64_t>(from.element_size());
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  auto* target = static_cast<char*>(to.mutable_data_ptr());
  const auto bytes = static_cast<std::size_t>(from.size(3) * size);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t place = places[static_cast<std::size_t>(r)] + t;
        std::memcpy(target + (r * to.stride(0) + h * to.stride(1) + place * to.stride(2)) * size,
                    source + (r * from.stride(0) + h * from.stride(1) + t * from.stride(2)) * size, bytes);
      }
    }
  }
}

}  // namespace

std::pair<at::Tensor, at::Tensor> KvCache::append(std::int64_t layer, const at::Tensor& k, const at::Tensor& v) {
  const at::NoGradGuard no_grad;
  const auto rows = std::ssize(seen_);
  const at::Tensor keys = keys_.at(static_cast<std::size_t>(layer)).narrow(0, first_row_, rows);
  const at::Tensor values = values_.at(static_cast<std::size_t>(layer)).narrow(0, first_row_, rows);
  std::vector<std::int64_t> places(seen_);
  for (auto& place : places) place -= tokens_;
  for (const auto& [from, to] : {std::pair(k, keys), std::pair(v, values)}) {
    if (from.is_cpu() && to.is_cpu() && from.scalar_type() == to.scalar_type() && from.stride(3) == 1) {
      copy_heads(from, to, places);
    } else if (same_) {
      to.narrow(2, start_, tokens_).copy_(from);
    } else if (places_.defined()) {
      // [rows * max_len, kv_heads, head_dim]
      to.transpose(1, 2).flatten(0, 1).index_copy_(0, places_, from.transpose(1, 2).flatten(0, 1).to(to.scalar_type()));
    } else {
      for (std::int64_t r = 0; r < rows; ++r) {
        to.select(0, r).narrow(1, places[static_cast<std::size_t>(r)], tokens_).copy_(from.select(0, r));
      }
    }
  }
  return {keys.narrow(2, 0, start_ + tokens_), values.narrow(2, 0, start_ + tokens_)};
}

void KvCache::finish() {
  for (std::size_t i = 0; i < counts_.size(); ++i) lengths_[i + static_cast<std::size_t>(first_row_)] += counts_[i];
  counts_.clear();
  positions_ = places_ = at::Tensor();
  masks_.clear();
  on_device_.reset();
}

void KvCache::move_row(std::int64_t from, std::int64_t to) {
  const std::int64_t held = length(from);
  if (from == to) return;
  for (const auto* buffers : {&keys_, &values_}) {
    for (const at::Tensor& buffer : *buffers) {
      buffer.select(0, to).narrow(1, 0, held).copy_(buffer.select(0, from).narrow(1, 0, held));
    }
  }
  lengths_.at(static_cast<std::size_t>(to)) = held;
  lengths_[static_cast<std::size_t>(from)] = 0;
}

void KvCache::truncate(std::int64_t row, std::int64_t length) {
  auto& held = lengths_.at(static_cast<std::size_t>(row));
  if (length < 0 || length > held) {
    throw Error(
        fmt::format("cannot truncate row {} of the key-value cache to {} tokens: it holds {}", row, length, held));
  }
  held = length;
}

void KvCache::truncate(std::int64_t length) {
  for (auto& held : lengths_) held = std::min(held, length);
}

}  // namespace phalanx::nn
