#include "phalanx/infer/scheduler.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

namespace phalanx::infer {
namespace {

std::size_t index(std::int64_t row) { return static_cast<std::size_t>(row); }

}  // namespace

void Scheduler::fill(const Next& next) {
  const auto free = std::count(rows_.begin(), rows_.end(), nullptr);
  if (free == 0) return;
  std::vector<std::unique_ptr<Sequence>> sequences = next(free);
  auto sequence = sequences.begin();
  for (std::int64_t row = 0; row < std::ssize(rows_) && sequence != sequences.end(); ++row) {
    if (rows_[index(row)]) continue;
    rows_[index(row)] = std::move(*sequence++);
    const std::int64_t length = rows_[index(row)]->prompt_length();
    // Runs together with the previous one if both fit into one pass and there is little padding.
    const bool follows = !runs_.empty() && runs_.back().first + runs_.back().count == row && length <= chunk_;
    const std::int64_t first = follows ? rows_[index(runs_.back().first)]->prompt_length() : 0;
    if (follows && first <= chunk_ && std::max(first, length) <= 2 * std::min(first, length)) {
      ++runs_.back().count;
    } else {
      runs_.push_back({.first = row, .count = 1});
    }
  }
}

void Scheduler::close_gaps() {
  used_ = std::ssize(rows_);
  for (std::int64_t row = 0; row < used_; ++row) {
    while (used_ > row && !rows_[index(used_ - 1)]) --used_;
    if (used_ <= row || rows_[index(row)]) continue;
    cache_.move_row(used_ - 1, row);
    rows_[index(row)] = std::move(rows_[index(used_ - 1)]);
  }
}

ForwardBatch Scheduler::prefill() {
  Run& run = runs_.front();
  std::int64_t longest = 0;
  for (std::int64_t r = 0; r < run.count; ++r) {
    longest = std::max(longest, rows_[index(run.first + r)]->prompt_length());
  }
  const std::int64_t width = std::min(chunk_, longest - run.done);
  ForwardBatch batch{.first_row = run.first,
                     .tokens = at::zeros({run.count, width}, at::TensorOptions(at::kLong)),
                     .is_prefill = true};
  for (std::int64_t r = 0; r < run.count; ++r) {
    const auto& prompt = rows_[index(run.first + r)]->request().prompt;
    batch.counts.push_back(std::min(width, std::ssize(prompt) - run.done));
    std::copy_n(prompt.begin() + run.done, batch.counts.back(),
                batch.tokens.mutable_data_ptr<std::int64_t>() + r * width);
    if (run.done + batch.counts.back() == std::ssize(prompt)) batch.sample_rows.push_back(r);
  }
  if (std::ranges::all_of(batch.counts, [&](std::int64_t count) { return count == width; })) batch.counts.clear();
  run.done += width;
  if (run.done == longest) runs_.pop_front();
  return batch;
}

std::optional<ForwardBatch> Scheduler::refill() {
  if (refill_at_ == 0) return std::nullopt;
  for (std::int64_t row = 0; row < used_; ++row) {
    if (cache_.length(row) != refill_at_) continue;
    cache_.truncate(row, 0);
    const Sequence& sequence = *rows_[index(row)];
    std::vector<std::int64_t> tokens = sequence.request().prompt;
    tokens.insert(tokens.end(), sequence.generated().begin(), sequence.generated().end());
    return ForwardBatch{
        .first_row = row, .tokens = at::tensor(tokens, at::TensorOptions(at::kLong)).unsqueeze(0), .sample_rows = {0}};
  }
  return std::nullopt;
}

ForwardBatch Scheduler::decode() const {
  ForwardBatch batch{.tokens = at::zeros({used_, 1}, at::TensorOptions(at::kLong))};
  for (std::int64_t row = 0; row < used_; ++row) {
    batch.tokens.mutable_data_ptr<std::int64_t>()[row] = rows_[index(row)]->last_token();
    batch.sample_rows.push_back(row);
  }
  return batch;
}

std::optional<ForwardBatch> Scheduler::next_batch(const Next& next) {
  if (runs_.empty()) {
    fill(next);
    close_gaps();
  }
  if (!runs_.empty()) return prefill();
  if (used_ == 0) return std::nullopt;
  if (auto again = refill()) return again;
  return decode();
}

std::unique_ptr<Sequence> Scheduler::remove(const ForwardBatch& batch, std::int64_t row) {
  const std::int64_t at = batch.first_row + row;
  cache_.truncate(at, 0);
  return std::move(rows_[index(at)]);
}

}  // namespace phalanx::infer
