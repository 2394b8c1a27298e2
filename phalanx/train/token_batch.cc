#include "phalanx/train/token_batch.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <span>
#include <vector>

namespace phalanx::train {
namespace {

TokenBatch on_host(std::int64_t rows, std::int64_t seq_len, at::Device device) {
  // Pinned, so that the copy to a GPU need not wait for the previous step.
  const auto options = at::TensorOptions(at::kLong).pinned_memory(!device.is_cpu());
  return {at::empty({rows, seq_len}, options), at::empty({rows, seq_len}, options)};
}

TokenBatch moved(TokenBatch batch, at::Device device) {
  if (device.is_cpu()) return batch;
  return {batch.inputs.to(device, /*non_blocking=*/true), batch.labels.to(device, /*non_blocking=*/true)};
}

std::span<std::int64_t> values(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<std::int64_t>(), static_cast<std::size_t>(tensor.numel())};
}

}  // namespace

TokenBatch load_batch(const data::DataLoader& dataloader, std::int64_t step, data::RowRange rows, at::Device device) {
  TokenBatch batch = on_host(rows.size(), dataloader.seq_len(), device);
  dataloader.fill(step, rows, values(batch.inputs), values(batch.labels));
  return moved(std::move(batch), device);
}

TokenBatch load_samples(const data::DataLoader& dataloader, std::int64_t first, std::int64_t rows, at::Device device) {
  const std::int64_t seq_len = dataloader.seq_len();
  TokenBatch batch = on_host(rows, seq_len, device);
  std::vector<std::int64_t> sample(static_cast<std::size_t>(seq_len) + 1);
  for (std::int64_t row = 0; row < rows; ++row) {
    dataloader.read_sample(first + row, sample);
    std::copy(sample.begin(), sample.end() - 1, batch.inputs.mutable_data_ptr<std::int64_t>() + row * seq_len);
    std::copy(sample.begin() + 1, sample.end(), batch.labels.mutable_data_ptr<std::int64_t>() + row * seq_len);
  }
  return moved(std::move(batch), device);
}

}  // namespace phalanx::train
