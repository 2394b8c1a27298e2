// Token ids on the device, ready for a model's loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "phalanx/data/data_loader.h"
#include "phalanx/layout/context_cut.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::train {

struct TokenBatch {
  at::Tensor inputs;  // int64 [rows, seq_len]
  at::Tensor labels;  // same type and shape, one token further; kIgnoredLabel: no loss
  std::shared_ptr<const DocumentBoundaries> documents = nullptr;  // null: each row is one document
  std::int64_t label_count = 0;  // tokens with a loss, among the positions of this rank
};

/// `cut`: the positions of the rank. The batch has whole rows in any case: the model takes its positions of them.
TokenBatch load_batch(const data::BatchSource& dataloader, std::int64_t step, data::RowRange rows, at::Device device,
                      const ContextCut& cut = {});

/// Samples [first, first + rows) of the range, in the file's order.
TokenBatch load_samples(const data::DataLoader& dataloader, std::int64_t first, std::int64_t rows, at::Device device,
                        const ContextCut& cut = {});

}  // namespace phalanx::train
