// Token ids on the device, ready for a model's loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "phalanx/data/data_loader.h"
#include "phalanx/layout/context_cut.h"
#include "phalanx/tensor/document_boundaries.h"
#include "phalanx/train/model/preference_batch.h"

namespace phalanx::train {

struct TokenBatch {
  at::Tensor inputs;  // int64 [rows, seq_len]
  at::Tensor labels;  // same type and shape, one token further; kIgnoredLabel: no loss
  std::shared_ptr<const DocumentBoundaries> documents = nullptr;  // null: each row is one document
  std::shared_ptr<const PreferenceBatch> preferences = nullptr;   // null: documents are no pairs
  /// Terms of the loss that this rank counts: tokens with a label among its positions; of pairs the first of the ranks
  /// that share their positions counts all.
  std::int64_t label_count = 0;
};

/// `cut`: the positions of the rank. The batch has whole rows in any case: the model takes its positions of them.
/// `reference`: of the file's pairs, as make_preference_batch() takes it.
TokenBatch load_batch(const data::BatchSource& dataloader, std::int64_t step, data::RowRange rows, at::Device device,
                      const ContextCut& cut = {}, const at::Tensor& reference = {});

/// Samples [first, first + rows) of the range, in the file's order.
TokenBatch load_samples(const data::DataLoader& dataloader, std::int64_t first, std::int64_t rows, at::Device device,
                        const ContextCut& cut = {}, const at::Tensor& reference = {});

}  // namespace phalanx::train
