#include "phalanx/tensor/document_boundaries.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

at::Tensor host_tensor(at::IntArrayRef shape, at::ScalarType type, at::Device device) {
  return at::empty(shape, at::TensorOptions(type).pinned_memory(!device.is_cpu()));
}

}  // namespace

DocumentBoundaries::DocumentBoundaries(std::int64_t seq_len, std::vector<std::int32_t> cumulative_lengths,
                                       at::Device device)
    : seq_len_(seq_len), ends_(std::move(cumulative_lengths)) {
  if (seq_len < 1 || ends_.size() < 2 || ends_.front() != 0 || ends_.back() % seq_len != 0) {
    throw Error(
        fmt::format("document boundaries: {} of rows of {} tokens, from {} to {}; expected 0, then the end of "
                    "each document, the last at a multiple of the row's length",
                    ends_.size(), seq_len, ends_.empty() ? -1 : ends_.front(), ends_.empty() ? -1 : ends_.back()));
  }
  const at::Tensor positions = host_tensor({ends_.back() / seq_len, seq_len}, at::kLong, device);
  auto* position = positions.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i + 1 < ends_.size(); ++i) {
    const std::int64_t begin = ends_[i], end = ends_[i + 1];
    if (end <= begin || begin / seq_len != (end - 1) / seq_len) {
      throw Error(
          fmt::format("document boundaries: document {} has tokens {} to {}; expected at least one, and all of "
                      "them within a row of {}",
                      i, begin, end, seq_len));
    }
    if (begin % seq_len == 0) first_of_row_.push_back(static_cast<std::int32_t>(i));
    longest_ = std::max(longest_, end - begin);
    for (std::int64_t p = 0; p < end - begin; ++p) *position++ = p;
  }
  first_of_row_.push_back(static_cast<std::int32_t>(ends_.size() - 1));
  const at::Tensor ends = host_tensor({std::ssize(ends_)}, at::kInt, device);
  std::ranges::copy(ends_, ends.mutable_data_ptr<std::int32_t>());
  ends_on_device_ = ends.to(device, /*non_blocking=*/true);
  positions_ = positions.to(device, /*non_blocking=*/true);
}

double DocumentBoundaries::pairs() const noexcept {
  double sum = 0;
  for (std::size_t i = 1; i < ends_.size(); ++i) {
    const double length = ends_[i] - ends_[i - 1];
    sum += length * length;
  }
  return sum;
}

std::span<const std::int32_t> DocumentBoundaries::of_row(std::int64_t row) const {
  const auto first = static_cast<std::size_t>(first_of_row_.at(static_cast<std::size_t>(row)));
  const auto last = static_cast<std::size_t>(first_of_row_.at(static_cast<std::size_t>(row + 1)));
  return std::span(ends_).subspan(first, last - first + 1);
}

std::shared_ptr<const DocumentBoundaries> DocumentBoundaries::narrow(std::int64_t first, std::int64_t count) const {
  std::vector<std::int32_t> ends = {0};
  for (std::int64_t row = first; row < first + count; ++row) {
    for (const std::int32_t end : of_row(row).subspan(1)) {
      ends.push_back(end - static_cast<std::int32_t>(first * seq_len_));
    }
  }
  return std::make_shared<const DocumentBoundaries>(seq_len_, std::move(ends), positions_.device());
}

std::shared_ptr<const DocumentBoundaries> DocumentBoundaries::padded(std::int64_t seq_len) const {
  std::vector<std::int32_t> ends = {0};
  for (std::int64_t row = 0; row < rows(); ++row) {
    const auto moved = static_cast<std::int32_t>(row * (seq_len - seq_len_));
    for (const std::int32_t end : of_row(row).subspan(1)) ends.push_back(end + moved);
    if (seq_len > seq_len_) ends.push_back(static_cast<std::int32_t>((row + 1) * seq_len));
  }
  return std::make_shared<const DocumentBoundaries>(seq_len, std::move(ends), positions_.device());
}

}  // namespace phalanx
