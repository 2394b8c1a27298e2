// Batches: which tokens a training step reads, as a pure function of (seed, step).
//
// Sample k is tokens [k*seq_len, k*seq_len + seq_len] of the range: seq_len inputs and, one further, seq_len labels;
// neighbouring samples share the one token that is the last label of one and the first input of the next. The global
// batch of step s (from 0) has rows 0 .. B-1; row i holds sample number g = s*B + i of the run. Epoch g / N (N samples
// in the range) visits every sample exactly once: in order (shuffle = false: sample g mod N) or in an order that is a
// function of (seed, epoch). Nothing depends on the number of ranks, so a resume may change it. Where it changes B or,
// without shuffling, seq_len, begin_at() lets the samples go on after the tokens that have been read: none is skipped,
// none is read twice. The rest of that epoch is then cut into samples from there on, the epochs after it as above.
//
// Rank r of d owns rows [r*B/d, (r+1)*B/d); of these, micro-batch m of M is the m-th M-th part. So rows run over ranks
// first and over micro-batches within a rank, and the union over ranks and micro-batches is the global batch, whatever
// d and M are. B must be a multiple of d*M: check_batch() says the nearest valid choices.
//
//   Batches dataloader(tokens, {.seq_len = 256, .global_batch_size = 8, .seed = 1});
//   const RowRange rows = batches.rows_of({.rank = 0, .ranks = 2, .micro_batch = 0, .micro_batches = 2});
//   batches.fill(step, rows, inputs, labels);  // int64 buffers of rows.size() * seq_len
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "phalanx/data/token_file.h"

namespace phalanx::data {

struct DataLoaderOptions {
  std::int64_t seq_len = 0;
  std::int64_t global_batch_size = 0;
  bool shuffle = true;
  std::uint64_t seed = 0;
  std::optional<TokenRange> range;  // part of the file to use; empty: all of it
};

/// A place in the stream of tokens that a run reads: so many of this epoch's have been read. In a shuffled epoch they
/// are those of its first token / seq_len samples.
struct StreamPosition {
  std::int64_t epoch = 0;
  std::int64_t token = 0;
  friend bool operator==(const StreamPosition&, const StreamPosition&) = default;
};

/// Rows [begin, end) of a global batch.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

/// A data-parallel rank and the micro-batch of its gradient accumulation.
struct BatchShare {
  std::int64_t rank = 0;
  std::int64_t ranks = 1;
  std::int64_t micro_batch = 0;
  std::int64_t micro_batches = 1;
};

/// ConfigError, with the nearest valid batch sizes and rank counts, unless ranks * micro_batches divides the batch.
void check_batch(std::int64_t global_batch_size, std::int64_t ranks, std::int64_t micro_batches = 1);

class DataLoader {
 public:
  /// DataError where the range holds no whole sample or reaches outside the file.
  DataLoader(TokenFile tokens, DataLoaderOptions options);

  std::int64_t seq_len() const { return options_.seq_len; }
  std::int64_t global_batch_size() const { return options_.global_batch_size; }
  std::int64_t sample_count() const { return sample_count_; }  // per epoch
  const TokenFile& tokens() const { return tokens_; }

  RowRange rows_of(const BatchShare& share) const;

  const DataLoaderOptions& options() const { return options_; }
  TokenRange range() const { return range_; }
  std::int64_t epoch_tokens() const { return sample_count_ * options_.seq_len; }

  /// Where the stream stands before this step.
  StreamPosition position_of(std::int64_t step) const { return place_of(step, 0); }
  /// From now on that of `step` is `position`. ConfigError for a place inside a shuffled epoch that is between samples.
  void begin_at(std::int64_t step, StreamPosition position);

  /// The first token of row `row` of the global batch of `step`, counted from the range's beginning.
  std::int64_t token_at(std::int64_t step, std::int64_t row) const;

  /// Inputs and labels of the given rows, row-major [rows, seq_len] each. Sizes that do not match: ConfigError.
  void fill(std::int64_t step, RowRange rows, std::span<std::int64_t> inputs, std::span<std::int64_t> labels) const;

  /// The seq_len + 1 tokens of one sample of an epoch that is read in order.
  void read_sample(std::int64_t sample, std::span<std::int64_t> out) const;

 private:
  StreamPosition place_of(std::int64_t step, std::int64_t row) const;
  void read_tokens(std::int64_t first, std::span<std::int64_t> out) const;

  TokenFile tokens_;
  DataLoaderOptions options_;
  TokenRange range_;
  std::int64_t sample_count_ = 0;
  std::int64_t first_step_ = 0;  // what begin_at() was told
  StreamPosition first_;
  std::int64_t rest_of_epoch_ = 0;  // samples from there to its epoch's end
};

}  // namespace phalanx::data
