#include "phalanx/nn/kv_cache.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"

namespace phalanx::nn {

KvCache::KvCache(const KvCacheOptions& options)
    : options_(options), lengths_(static_cast<std::size_t>(options.batch), 0) {
  const auto tensor = at::TensorOptions(options.dtype).device(options.device);
  for (std::int64_t layer = 0; layer < options.layers; ++layer) {
    for (auto* buffers : {&keys_, &values_}) {
      // Zeros, not garbage: a masked position still enters a product with weight 0, and 0 * NaN would be NaN.
      buffers->push_back(at::zeros({options.batch, options.kv_heads, options.max_len, options.head_dim}, tensor));
    }
  }
}

bool KvCache::uniform() const noexcept {
  return std::all_of(lengths_.begin(), lengths_.end(), [&](std::int64_t n) { return n == lengths_.front(); });
}

std::int64_t KvCache::longest() const noexcept {
  return lengths_.empty() ? 0 : *std::max_element(lengths_.begin(), lengths_.end());
}

std::int64_t KvCache::bytes() const noexcept {
  std::int64_t sum = 0;
  for (const auto& k : keys_) sum += 2 * static_cast<std::int64_t>(k.nbytes());
  return sum;
}

void KvCache::begin(std::int64_t tokens, std::vector<std::int64_t> counts) {
  if (counts.empty()) counts.assign(lengths_.size(), tokens);
  if (counts.size() != lengths_.size()) {
    throw Error(fmt::format("{} token counts were given for a cache of {} rows", counts.size(), lengths_.size()));
  }
  for (std::size_t r = 0; r < lengths_.size(); ++r) {
    if (counts[r] < 0 || counts[r] > tokens) {
      throw Error(
          fmt::format("row {}: {} real tokens out of {} given: expected 0 to {}", r, counts[r], tokens, tokens));
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
  counts_ = std::move(counts);
  positions_ = mask_ = at::Tensor();
  const bool same = uniform();
  const at::TensorOptions integers = at::TensorOptions(at::kLong);
  at::Tensor positions;
  const bool beyond_window = options_.window > 0 && longest() + tokens > options_.window;
  if (!same || beyond_window || (longest() > 0 && tokens > 1)) {
    positions = at::tensor(lengths_, integers).unsqueeze(1) + at::arange(tokens, integers);  // [batch, tokens]
    const at::Tensor keys = at::arange(longest() + tokens, integers);
    const at::Tensor distance = positions.unsqueeze(-1) - keys;  // [batch, tokens, keys]
    const at::Tensor seen = beyond_window ? (distance >= 0) & (distance < options_.window) : distance >= 0;
    mask_ = seen.unsqueeze(1).to(options_.device);  // [batch, 1, tokens, keys]
  }
  if (!same) positions_ = positions.to(options_.device);
}

std::pair<at::Tensor, at::Tensor> KvCache::append(std::int64_t layer, const at::Tensor& k, const at::Tensor& v) {
  const at::NoGradGuard no_grad;
  auto& keys = keys_.at(static_cast<std::size_t>(layer));
  auto& values = values_.at(static_cast<std::size_t>(layer));
  if (positions_.defined()) {
    for (std::size_t r = 0; r < lengths_.size(); ++r) {
      const auto row = static_cast<std::int64_t>(r);
      keys.select(0, row).narrow(1, lengths_[r], tokens_).copy_(k.select(0, row));
      values.select(0, row).narrow(1, lengths_[r], tokens_).copy_(v.select(0, row));
    }
  } else {
    keys.narrow(2, longest(), tokens_).copy_(k);
    values.narrow(2, longest(), tokens_).copy_(v);
  }
  return {keys.narrow(2, 0, longest() + tokens_), values.narrow(2, 0, longest() + tokens_)};
}

void KvCache::finish() {
  for (std::size_t r = 0; r < lengths_.size(); ++r) lengths_[r] += counts_[r];
  tokens_ = 0;
  counts_.clear();
  positions_ = mask_ = at::Tensor();
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
