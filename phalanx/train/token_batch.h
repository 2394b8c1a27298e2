// Token ids on the device, ready for a model's loss.
#pragma once

#include <ATen/core/Tensor.h>

#include "phalanx/data/data_loader.h"

namespace phalanx::train {

struct TokenBatch {
  at::Tensor inputs;  // int64 [rows, seq_len]
  at::Tensor labels;  // same type and shape, one token further
};

TokenBatch load_batch(const data::DataLoader& dataloader, std::int64_t step, data::RowRange rows, at::Device device);

/// Samples [first, first + rows) of the range, in the file's order.
TokenBatch load_samples(const data::DataLoader& dataloader, std::int64_t first, std::int64_t rows, at::Device device);

}  // namespace phalanx::train
