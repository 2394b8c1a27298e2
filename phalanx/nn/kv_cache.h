// Keys and values of the tokens seen so far, for generation: per layer two buffers [batch, kv_heads, max_len, head_dim]
// allocated once.
//
// Rows may hold different numbers of tokens. Row r's valid tokens are always positions 0 .. length(r) - 1 of its
// buffers: unequal prompts are padded on the RIGHT, each append says how many of its tokens are real in each row, and
// the next append of a row overwrites its padding. So a row's result does not depend on its neighbours' lengths.
//
// One forward pass: begin(counts) once, append() in each layer, finish() once; the model does this. Between passes a
// caller may truncate() rows (stop sequences, rejected drafts) or reset().
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
  /// True where all rows hold the same number of tokens.
  bool uniform() const noexcept;
  std::int64_t longest() const noexcept;
  std::int64_t bytes() const noexcept;

  /// Starts a pass of `tokens` positions a row, of which counts[r] are real (empty: all). Throws Error where a row
  /// would exceed max_len, naming the row; the cache is then as it was.
  void begin(std::int64_t tokens, std::vector<std::int64_t> counts = {});
  /// Writes this pass's k and v [batch, kv_heads, tokens, head_dim] behind each row's valid tokens; returns views
  /// [batch, kv_heads, longest() + tokens, head_dim] of all keys and values.
  std::pair<at::Tensor, at::Tensor> append(std::int64_t layer, const at::Tensor& k, const at::Tensor& v);
  /// Positions [batch, tokens] of this pass where rows differ; undefined where they all start at longest().
  const at::Tensor& positions() const noexcept { return positions_; }
  /// Bool [batch, 1, tokens, longest() + tokens]: which keys each of this pass's queries may see. Undefined where
  /// plain causal attention (cache was empty) or full attention (one token a row, rows equal) says the same.
  const at::Tensor& mask() const noexcept { return mask_; }
  /// Ends the pass: rows grow by their counts.
  void finish();

  /// Keeps the first `length` tokens of a row (of every row).
  void truncate(std::int64_t row, std::int64_t length);
  void truncate(std::int64_t length);
  void reset() { truncate(0); }

 private:
  KvCacheOptions options_;
  std::vector<at::Tensor> keys_, values_;
  std::vector<std::int64_t> lengths_, counts_;
  std::int64_t tokens_ = 0;
  at::Tensor positions_, mask_;
};

}  // namespace phalanx::nn
