#include "phalanx/train/model/preference_batch.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <span>

namespace phalanx::train {

std::shared_ptr<const PreferenceBatch> PreferenceBatch::narrow(std::int64_t first, std::int64_t count) const {
  const auto row = pairs_of_row.begin() + first;
  const std::int64_t before = std::accumulate(pairs_of_row.begin(), row, std::int64_t{0});
  const std::int64_t here = std::accumulate(row, row + count, std::int64_t{0});
  auto part = std::make_shared<PreferenceBatch>();
  part->documents = documents.narrow(0, first, count).sub(2 * before).clamp_min_(0);  // padding is of document 0
  part->pairs_of_row.assign(row, row + count);
  part->numbers.assign(numbers.begin() + before, numbers.begin() + before + here);
  if (reference.defined()) part->reference = reference.narrow(0, before, here);
  return part;
}

std::shared_ptr<const PreferenceBatch> make_preference_batch(
    const std::vector<std::vector<std::int64_t>>& pairs_of_rows, const DocumentBoundaries& boundaries,
    const at::Tensor& table, at::Device device) {
  if (pairs_of_rows.empty()) return nullptr;
  auto batch = std::make_shared<PreferenceBatch>();
  for (const std::vector<std::int64_t>& row : pairs_of_rows) {
    batch->pairs_of_row.push_back(std::ssize(row));
    batch->numbers.insert(batch->numbers.end(), row.begin(), row.end());
  }
  // Pinned, so that the copies to a GPU need not wait for the previous step.
  const bool is_pinned = !device.is_cpu();
  const at::Tensor documents =
      at::empty({boundaries.rows(), boundaries.seq_len()}, at::TensorOptions(at::kLong).pinned_memory(is_pinned))
          .zero_();
  auto* const ids = documents.mutable_data_ptr<std::int64_t>();
  std::int64_t document = 0;
  for (std::int64_t row = 0; row < boundaries.rows(); ++row) {
    const std::span<const std::int32_t> starts = boundaries.of_row(row);
    const std::int64_t count = 2 * batch->pairs_of_row[static_cast<std::size_t>(row)];  // padding is behind them
    for (std::int64_t i = 0; i < count; ++i, ++document) {
      std::fill(ids + starts[static_cast<std::size_t>(i)], ids + starts[static_cast<std::size_t>(i + 1)], document);
    }
  }
  batch->documents = documents.to(device, /*non_blocking=*/true);
  if (!table.defined()) return batch;
  const at::Tensor reference = at::empty({batch->pairs(), 2}, table.options().pinned_memory(is_pinned));
  for (std::int64_t i = 0; i < batch->pairs(); ++i) {
    std::copy_n(table.const_data_ptr<double>() + 2 * batch->numbers[static_cast<std::size_t>(i)], 2,
                reference.mutable_data_ptr<double>() + 2 * i);
  }
  batch->reference = reference.to(device, /*non_blocking=*/true);
  return batch;
}

}  // namespace phalanx::train
