// Keys and values of the tokens seen so far, for generation: per layer two buffers [batch, kv_heads, max_len, head_dim]
// allocated once.
//
// Rows may hold different numbers of tokens. Row r's valid tokens are always positions 0 .. length(r) - 1 of its
// buffers: unequal prompts are padded on the RIGHT, each append says how many of its tokens are real in each row, and
// the next append of a row overwrites its padding. So a row's result does not depend on its neighbours' lengths.
//
// One forward pass, of all rows or some that follow each other: begin() once, append() in each layer, finish() once;
// the model does this. Between passes a caller may truncate() rows (stop sequences, rejected drafts, a slot that the
// next sequence gets), move_row(), or reset().
//
//   KvCache cache({.layers = 4, .batch = 2, .kv_heads = 2, .max_len = 512, .head_dim = 64});
//   auto logits = model->forward(prompts, cache, {17, 9});   // [2, vocab]: each row's last real token
//   logits = model->forward(next_tokens, cache);             // [2, vocab]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace phalanx::nn {

struct KvCacheOptions {
  std::int64_t layers = 0;
  std::int64_t batch = 1;
  std::int64_t kv_heads = 0;
  std::int64_t max_len = 0;
  std::int64_t head_dim = 0;
  std::int64_t window = 0;  // a position sees itself and so many less one before it; 0: all before it
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

  /// Starts a pass of `tokens` positions a row over the rows from `first_row` on, of which counts[r] are real in the
  /// r-th of them (empty: all, in all rows). Throws Error where a row would exceed max_len, naming the row; the cache
  /// is then as it was.
  void begin(std::int64_t tokens, std::vector<std::int64_t> counts = {}, std::int64_t first_row = 0);
  /// Writes this pass's k and v [rows, kv_heads, tokens, head_dim] behind each row's valid tokens; returns views
  /// [rows, kv_heads, start() + tokens, head_dim] of all keys and values.
  std::pair<at::Tensor, at::Tensor> append(std::int64_t layer, const at::Tensor& k, const at::Tensor& v);
  /// Ends the pass: rows grow by their counts.
  void finish();

  // Of the pass under way:
  std::int64_t start() const noexcept { return start_; }                    // tokens that its longest row held before
  const std::vector<std::int64_t>& seen() const noexcept { return seen_; }  // by row: with this pass's, padding too
  bool is_first() const noexcept { return start_ == 0; }                    // its rows were empty
  /// Positions [rows, tokens] where rows differ; undefined where they all begin at start().
  const at::Tensor& positions() const noexcept { return positions_; }
  /// Bool [rows, 1, tokens, start() + tokens]: which keys each query may see. Undefined where all may see all.
  const at::Tensor& mask();

  /// Keeps the first `length` tokens of a row (of every row).
  void truncate(std::int64_t row, std::int64_t length);
  void truncate(std::int64_t length);
  void reset() { truncate(0); }
  /// What row `from` holds is in row `to` now, and nothing in `from`.
  void move_row(std::int64_t from, std::int64_t to);

 private:
  KvCacheOptions options_;
  std::vector<at::Tensor> keys_, values_;
  std::vector<std::int64_t> lengths_, counts_, seen_;
  std::int64_t tokens_ = 0, first_row_ = 0, start_ = 0;
  bool same_ = true;  // the pass's rows hold equally many tokens
  at::Tensor positions_, mask_;
  bool mask_is_made_ = false;
};

}  // namespace phalanx::nn
