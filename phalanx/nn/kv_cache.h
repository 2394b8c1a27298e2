// KvCache: keys and values of the tokens seen so far, for generation. Per layer it has two buffers [batch, kv_heads,
// max_len, head_dim], allocated once. In the memory of a GPU a token's heads lie side by side, as
// kernels/cached_attention.h wants them; in the host's memory a head's tokens do.
//
// Rows may hold different numbers of tokens. Row r's valid tokens are always positions 0 .. length(r) - 1 of its
// buffers. Unequal prompts are padded on the RIGHT: each append says how many of its tokens are real in each row, and
// the next append of a row overwrites its padding. So a row's result does not depend on its neighbours' lengths, but
// for rounding on a GPU.
//
// A forward pass, over all rows or a contiguous range of them, calls begin() once, append() in each layer, and finish()
// once. The model does this. Between passes a caller may truncate() rows (stop sequences, rejected drafts, a slot for
// the next sequence), move_row(), or reset().
//
//   KvCache cache({.layers = 4, .batch = 2, .kv_heads = 2, .max_len = 512, .head_dim = 64});
//   auto logits = model->forward(prompts, cache, {17, 9});   // [2, vocab]: each row's last real token
//   logits = model->forward(next_tokens, cache);             // [2, vocab]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "phalanx/kernels/cached_attention.h"

namespace phalanx::nn {

struct KvCacheOptions {
  std::int64_t layers = 0;
  std::int64_t batch = 1;
  std::int64_t kv_heads = 0;
  std::int64_t max_len = 0;
  std::int64_t head_dim = 0;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
};

class KvCache {
 public:
  explicit KvCache(const KvCacheOptions& options);

  const KvCacheOptions& options() const noexcept { return options_; }
  std::int64_t length(std::int64_t row) const { return lengths_.at(static_cast<std::size_t>(row)); }
  const std::vector<std::int64_t>& lengths() const noexcept { return lengths_; }
  std::int64_t longest() const noexcept;  // of all rows
  std::int64_t bytes() const noexcept;

  /// Starts a pass of `tokens` positions per row over the rows from `first_row` on. counts[r] of them are real in the
  /// r-th of these rows (empty: all, in all rows). Throws an Error that names the row if a row would exceed max_len.
  /// ENSURES: after an Error the cache is unchanged.
  void begin(std::int64_t tokens, std::vector<std::int64_t> counts = {}, std::int64_t first_row = 0);
  /// Writes this pass's k and v [rows, kv_heads, tokens, head_dim] behind each row's valid tokens. Returns views
  /// [rows, kv_heads, start() + tokens, head_dim] of all keys and values.
  std::pair<at::Tensor, at::Tensor> append(std::int64_t layer, const at::Tensor& k, const at::Tensor& v);
  /// Ends the pass: rows grow by their counts.
  void finish();

  // The pass in progress:
  std::int64_t start() const noexcept { return start_; }                    // tokens that its longest row held before
  const std::vector<std::int64_t>& seen() const noexcept { return seen_; }  // by row, including this pass and padding
  bool is_first() const noexcept { return start_ == 0; }                    // its rows were empty
  /// Positions [rows, tokens] if rows differ; undefined if they all begin at start().
  const at::Tensor& positions() const noexcept { return positions_; }
  /// The rows' lengths on the device if they differ, the pass has one token a row,
  /// and the cache is not on the CPU; else null.
  const kernels::CachedLengths* lengths_on_device() const noexcept { return on_device_ ? &*on_device_ : nullptr; }
  /// Bool [rows, 1, tokens, start() + tokens]: which keys each query may see. Undefined if all may see all. With
  /// `window` > 0 a position sees itself and window - 1 before it.
  const at::Tensor& mask(std::int64_t window = 0);

  /// Keeps the first `length` tokens of a row (of every row).
  void truncate(std::int64_t row, std::int64_t length);
  void truncate(std::int64_t length);
  void reset() { truncate(0); }
  /// Moves the contents of row `from` to row `to` and leaves `from` empty.
  void move_row(std::int64_t from, std::int64_t to);

 private:
  bool is_on_device() const noexcept { return !options_.device.is_cpu(); }

  KvCacheOptions options_;
  std::vector<at::Tensor> keys_, values_;
  std::vector<std::int64_t> lengths_, counts_, seen_;
  std::int64_t tokens_ = 0, first_row_ = 0, start_ = 0;
  bool same_ = true;  // the pass's rows hold equally many tokens
  at::Tensor positions_;
  std::map<std::int64_t, at::Tensor> masks_;  // of this pass, by window
  at::Tensor places_;  // int64 [rows * tokens] on the device, if rows differ: where this pass's tokens go
  at::Tensor first_keys_, first_query_;  // int32 [batch + 1], on a device
  std::optional<kernels::CachedLengths> on_device_;
};

}  // namespace phalanx::nn
