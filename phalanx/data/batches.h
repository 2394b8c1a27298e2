// Batches: which tokens a training step reads, as a pure function of (seed, step).
//
// Sample k is tokens [k*seq_len, k*seq_len + seq_len] of the range: seq_len inputs and, one further, seq_len labels;
// neighbouring samples share the one token that is the last label of one and the first input of the next. The global
// batch of step s (from 0) has rows 0 .. B-1; row i holds sample number g = s*B + i of the run. Epoch g / N (N samples
// in the range) visits every sample exactly once: in order (shuffle = false: sample g mod N) or in an order that is a
// function of (seed, epoch). Nothing depends on the number of ranks, so a resume may change it. Where it changes B,
// too, begin_at() lets the samples go on after those that have been read: none is skipped, none is read twice.
//
// Rank r of d owns rows [r*B/d, (r+1)*B/d); of these, micro-batch m of M is the m-th M-th part. So rows run over ranks
// first and over micro-batches within a rank, and the union over ranks and micro-batches is the global batch, whatever
// d and M are. B must be a multiple of d*M: check_batch() says the nearest valid choices.
//
//   Batches batches(tokens, {.seq_len = 256, .global_batch_size = 8, .seed = 1});
//   const RowRange rows = batches.rows_of({.rank = 0, .ranks = 2, .micro_batch = 0, .micro_batches = 2});
//   batches.fill(step, rows, inputs, labels);  // int64 buffers of rows.size() * seq_len
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "phalanx/data/token_file.h"

namespace phalanx::data {

struct BatchOptions {
  std::int64_t seq_len = 0;
  std::int64_t global_batch_size = 0;
  bool shuffle = true;
  std::uint64_t seed = 0;
  std::optional<TokenRange> range;  // part of the file to use; empty: all of it
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

class Batches {
 public:
  /// DataError where the range holds no whole sample or reaches outside the file.
  Batches(TokenFile tokens, BatchOptions options);

  std::int64_t seq_len() const { return options_.seq_len; }
  std::int64_t global_batch_size() const { return options_.global_batch_size; }
  std::int64_t sample_count() const { return sample_count_; }  // per epoch
  const TokenFile& tokens() const { return tokens_; }

  RowRange rows_of(const BatchShare& share) const;

  /// The number, in the run, of the first sample of this step: samples read before it.
  std::int64_t position_of(std::int64_t step) const { return offset_ + step * options_.global_batch_size; }
  /// From now on that of `step` is `position`.
  void begin_at(std::int64_t step, std::int64_t position) { offset_ = position - step * options_.global_batch_size; }

  /// The sample in row `row` of the global batch of `step`.
  std::int64_t sample_at(std::int64_t step, std::int64_t row) const;

  /// Inputs and labels of the given rows, row-major [rows, seq_len] each. Sizes that do not match: ConfigError.
  void fill(std::int64_t step, RowRange rows, std::span<std::int64_t> inputs, std::span<std::int64_t> labels) const;

  /// The seq_len + 1 tokens of one sample.
  void read_sample(std::int64_t sample, std::span<std::int64_t> out) const;

 private:
  TokenFile tokens_;
  BatchOptions options_;
  TokenRange range_;
  std::int64_t sample_count_ = 0;
  std::int64_t offset_ = 0;  // of g, the sample number above
};

}  // namespace phalanx::data
