// DocumentBoundaries: where documents begin in a batch whose rows hold several of them. Attention uses it to keep
// documents apart, and rotary or learnt positions to count from each document's start.
//
//   // Two rows of 8 tokens: documents of 3 and 5 tokens, then of 6 and 2.
//   const auto documents = std::make_shared<const DocumentBoundaries>(8, std::vector<std::int32_t>{0, 3, 8, 14, 16});
//   documents->positions();    // int64 [2, 8]: 0 1 2 0 1 2 3 4, then 0 1 2 3 4 5 0 1
//   at::Tensor loss = model->loss(tokens, labels, {.documents = documents});
//
// Rows are counted one after the other, as in tokens.flatten(). Every row begins a document, so no document is longer
// than a row. Padding is a document, too: nothing sees it but itself. Immutable.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace phalanx {

class DocumentBoundaries {
 public:
  /// `cumulative_lengths`: 0, then the end of each document, the last at rows * seq_len. Copies to `device` are
  /// asynchronous. Throws Error if they do not increase, or if a document crosses the end of a row.
  DocumentBoundaries(std::int64_t seq_len, std::vector<std::int32_t> cumulative_lengths, at::Device device = at::kCPU);

  std::int64_t rows() const noexcept { return ends_.back() / seq_len_; }
  std::int64_t seq_len() const noexcept { return seq_len_; }
  std::int64_t longest() const noexcept { return longest_; }  // tokens of the longest document
  std::int64_t count() const noexcept { return std::ssize(ends_) - 1; }
  /// The sum of the squared lengths: how many pairs of tokens share a document.
  double pairs() const noexcept;

  /// On the host, and int32 [count + 1] on the device, as kernels with variable lengths take them.
  const std::vector<std::int32_t>& cumulative_lengths() const noexcept { return ends_; }
  const at::Tensor& cumulative_lengths_on_device() const noexcept { return ends_on_device_; }
  /// Of row `row`: the starts of its documents within the batch, and the end of the last one.
  std::span<const std::int32_t> of_row(std::int64_t row) const;
  /// int64 [rows, seq_len] on the device: how many tokens of its document precede each token.
  const at::Tensor& positions() const noexcept { return positions_; }

  /// Those of rows [first, first + count), such as a micro-batch.
  std::shared_ptr<const DocumentBoundaries> narrow(std::int64_t first, std::int64_t count) const;
  /// Those of rows of `seq_len` tokens, of which these are the first; what is added to a row is one document.
  std::shared_ptr<const DocumentBoundaries> padded(std::int64_t seq_len) const;

 private:
  std::int64_t seq_len_;
  std::vector<std::int32_t> ends_;
  std::vector<std::int32_t> first_of_row_;  // [rows + 1], indices of ends_
  std::int64_t longest_ = 0;
  at::Tensor ends_on_device_, positions_;
};

}  // namespace phalanx
