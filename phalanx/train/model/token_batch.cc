#include "phalanx/train/model/token_batch.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/layout/packed_cut.h"

namespace phalanx::train {
namespace {

TokenBatch on_host(std::int64_t rows, std::int64_t seq_len, at::Device device) {
  // Pinned, so that the copy to a GPU need not wait for the previous step.
  const auto options = at::TensorOptions(at::kLong).pinned_memory(!device.is_cpu());
  return {.inputs = at::empty({rows, seq_len}, options), .labels = at::empty({rows, seq_len}, options)};
}

std::int64_t labels_of(const at::Tensor& labels, const ContextCut& cut, const DocumentBoundaries* documents) {
  if (cut.ranks == 1) return kernels::counted_labels(labels);
  const std::int64_t seq = labels.size(1);
  std::int64_t sum = 0;
  const auto add = [&](const at::Tensor& rows, std::span<const PositionRange> ranges) {
    for (const auto& [first, count] : ranges) {
      const std::int64_t n = std::min(count, seq - first);  // the rest is padding
      if (n > 0) sum += kernels::counted_labels(rows.narrow(1, first, n).contiguous());
    }
  };
  if (!cut.by_work || documents == nullptr) {
    add(labels, cut.ranges(seq));
    return sum;
  }
  for (std::int64_t row = 0; row < labels.size(0); ++row) {
    add(labels.narrow(0, row, 1), packed_ranges(cut, documents->of_row(row))[static_cast<std::size_t>(cut.rank)]);
  }
  return sum;
}

struct Documents {
  std::vector<std::int32_t> ends;
  std::vector<std::vector<std::int64_t>> pairs = {};  // by row
};

TokenBatch moved(TokenBatch batch, Documents of_rows, at::Device device, const ContextCut& cut,
                 const at::Tensor& reference) {
  if (!of_rows.ends.empty()) {
    batch.documents = std::make_shared<const DocumentBoundaries>(batch.inputs.size(1), std::move(of_rows.ends), device);
    batch.preferences = make_preference_batch(of_rows.pairs, *batch.documents, reference, device);
  }
  batch.label_count = !batch.preferences ? labels_of(batch.labels, cut, batch.documents.get())
                      : cut.rank == 0    ? batch.preferences->pairs()
                                         : 0;
  if (device.is_cpu()) return batch;
  batch.inputs = batch.inputs.to(device, /*non_blocking=*/true);
  batch.labels = batch.labels.to(device, /*non_blocking=*/true);
  return batch;
}

std::span<std::int64_t> values(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<std::int64_t>(), static_cast<std::size_t>(tensor.numel())};
}

}  // namespace

TokenBatch load_batch(const data::BatchSource& dataloader, std::int64_t step, data::RowRange rows, at::Device device,
                      const ContextCut& cut, const at::Tensor& reference) {
  TokenBatch batch = on_host(rows.size(), dataloader.seq_len(), device);
  auto ends = dataloader.fill(step, rows, values(batch.inputs), values(batch.labels));
  return moved(std::move(batch), {std::move(ends), dataloader.pairs_of(step, rows)}, device, cut, reference);
}

TokenBatch load_samples(const data::DataLoader& dataloader, std::int64_t first, std::int64_t rows, at::Device device,
                        const ContextCut& cut, const at::Tensor& reference) {
  TokenBatch batch = on_host(rows, dataloader.seq_len(), device);
  auto ends = dataloader.fill_samples(first, rows, values(batch.inputs), values(batch.labels));
  return moved(std::move(batch), {std::move(ends), dataloader.pairs_of_samples(first, rows)}, device, cut, reference);
}

}  // namespace phalanx::train
