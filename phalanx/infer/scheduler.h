// Scheduler manages the rows of one cache and the sequences in them, with continuous batching: when a sequence ends,
// its row goes to the next request at once. It decides which forward pass comes next; it does not run it.
//
// The rows in use are always the first ones: a later sequence moves into a gap that no request fills. New sequences
// of similar length are prefilled together (the shorter ones padded), long ones alone and in chunks. Then all rows
// decode one token per pass.
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
  /// A row that holds `refill_at` tokens is computed anew together with its next one; 0: never. For rotary embeddings
  /// whose angles change there.
  Scheduler(nn::KvCache cache, std::int64_t prefill_chunk, std::int64_t refill_at = 0)
      : cache_(std::move(cache)), chunk_(prefill_chunk), refill_at_(refill_at) {
    rows_.resize(static_cast<std::size_t>(cache_.options().batch));
  }

  /// Returns sequences for up to `free` free rows; empty: there are no more.
  using Next = std::function<std::vector<std::unique_ptr<Sequence>>(std::int64_t free)>;
  /// Returns the next pass; nothing if no sequence is left.
  /// REQUIRES: no other pass is in flight.
  std::optional<ForwardBatch> next_batch(const Next& next);
  nn::KvCache& cache() noexcept { return cache_; }
  /// The sequence of a row of the pass that next_batch() returned.
  Sequence& sequence_of(const ForwardBatch& batch, std::int64_t row) {
    return *rows_[static_cast<std::size_t>(batch.first_row + row)];
  }
  /// Removes a sequence that has ended from its row.
  std::unique_ptr<Sequence> remove(const ForwardBatch& batch, std::int64_t row);

 private:
  struct Run {  // rows whose prompts are prefilled together
    std::int64_t first = 0, count = 0, done = 0;
  };
  void fill(const Next& next);
  void close_gaps();
  ForwardBatch prefill();
  std::optional<ForwardBatch> refill();
  ForwardBatch decode() const;

  nn::KvCache cache_;
  std::int64_t chunk_, refill_at_;
  std::vector<std::unique_ptr<Sequence>> rows_;
  std::int64_t used_ = 0;  // when gaps are closed, this many first rows have sequences
  std::deque<Run> runs_;
};

}  // namespace phalanx::infer
