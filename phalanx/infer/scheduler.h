// Rows of one cache and the sequences in them, with continuous batching: a row whose sequence has ended takes the next
// request at once. Says which forward pass comes next; does not run it.
//
// Rows in use are the first ones: a sequence from further behind moves into a gap that no request fills. New sequences
// of like length go through the model together (the shorter ones padded), long ones alone and in chunks; then all rows
// decode one token a pass.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "phalanx/infer/sequence.h"
#include "phalanx/infer/stage_runner.h"
#include "phalanx/nn/kv_cache.h"

namespace phalanx::infer {

class Scheduler {
 public:
  Scheduler(nn::KvCache cache, std::int64_t prefill_chunk) : cache_(std::move(cache)), chunk_(prefill_chunk) {
    rows_.resize(static_cast<std::size_t>(cache_.options().batch));
  }

  /// Sequences for up to so many free rows; none: there are no more.
  using Next = std::function<std::vector<std::unique_ptr<Sequence>>(std::int64_t free)>;
  /// The next pass, nothing where no sequence is left. Not while another is under way.
  std::optional<ForwardBatch> next_batch(const Next& next);
  nn::KvCache& cache() noexcept { return cache_; }
  /// Of a row of the pass that next_batch() has given.
  Sequence& sequence_of(const ForwardBatch& batch, std::int64_t row) {
    return *rows_[static_cast<std::size_t>(batch.first_row + row)];
  }
  /// Takes a sequence that has ended out of its row.
  std::unique_ptr<Sequence> remove(const ForwardBatch& batch, std::int64_t row);

 private:
  struct Run {  // rows whose prompts go through the model together
    std::int64_t first = 0, count = 0, done = 0;
  };
  void fill(const Next& next);
  void close_gaps();
  ForwardBatch prefill();
  ForwardBatch decode() const;

  nn::KvCache cache_;
  std::int64_t chunk_;
  std::vector<std::unique_ptr<Sequence>> rows_;
  std::int64_t used_ = 0;  // the first so many rows have sequences, when gaps are closed
  std::deque<Run> runs_;
};

}  // namespace phalanx::infer
