#include "phalanx/optim/row_squares.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <mutex>

#include "phalanx/optim/sum_of_squares.h"
#include "phalanx/optim/widen.h"

namespace phalanx {
namespace {

// Elements of one part. Longer rows are cut at this size, and short rows are grouped up to it.
constexpr auto kPart = static_cast<std::int64_t>(kSumOfSquaresBlock);

}  // namespace

void RowSquares::add_rows(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const std::int64_t length = tensor.numel() / rows;
  const auto* values = static_cast<const char*>(tensor.const_data_ptr());
  const auto add = [&](std::int64_t first, std::int64_t part_rows, std::int64_t part_length) {
    parts_.push_back({values + first * tensor.itemsize(), tensor.scalar_type(), part_rows, part_length});
  };
  if (length > kPart) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t at = 0; at < length; at += kPart) add(row * length + at, 1, std::min(kPart, length - at));
    }
  } else {
    const std::int64_t together = kPart / length;
    for (std::int64_t row = 0; row < rows; row += together) {
      add(row * length, std::min(together, rows - row), length);
    }
  }
}

void RowSquares::add_part(const Part& part, std::vector<float>& widened, ExactSum& sum) {
  const std::int64_t count = part.rows * part.length;
  const auto* values = static_cast<const float*>(part.values);
  if (is_16_bit(part.dtype)) {
    widened.resize(static_cast<std::size_t>(count));
    widen(part.dtype, widened.size(), part.values, widened.data());
    values = widened.data();
  }
  if (part.length == 1) {
    for (std::int64_t i = 0; i < count; ++i) {
      const double x = values[i];
      sum.add(x * x);
    }
    return;
  }
  const auto length = static_cast<std::size_t>(part.length);
  for (std::int64_t row = 0; row < part.rows; ++row, values += length) sum.add(sum_of_squares(values, length));
}

ExactSum RowSquares::sum() const {
  ExactSum total;
  std::mutex mutex;
  at::parallel_for(0, static_cast<std::int64_t>(parts_.size()), /*grain_size=*/4,
                   [&](std::int64_t begin, std::int64_t end) {
                     ExactSum sum;
                     std::vector<float> widened;
                     for (std::int64_t i = begin; i < end; ++i) {
                       add_part(parts_[static_cast<std::size_t>(i)], widened, sum);
                     }
                     const std::lock_guard lock(mutex);
                     total.merge(sum);
                   });
  return total;
}

}  // namespace phalanx
