// The pairs of preferences of a batch ([dpo]): two documents each, the chosen and the rejected answer, in one row.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::train {

struct PreferenceBatch {
  at::Tensor
      documents;  // int64 [rows, seq_len]: 2 i for the chosen answer of pair i of the batch, 2 i + 1 for the rejected
  std::vector<std::int64_t> pairs_of_row;
  std::vector<std::int64_t> numbers;  // of the pairs, in their file
  /// float64 [pairs, 2]: what the reference says of the two answers (PreferenceReference). Undefined: not known.
  at::Tensor reference;

  std::int64_t pairs() const { return std::ssize(numbers); }
  /// Those of rows [first, first + count), such as a micro-batch.
  std::shared_ptr<const PreferenceBatch> narrow(std::int64_t first, std::int64_t count) const;
};

/// `pairs_of_rows`: BatchSource::pairs_of(). `table`: float64 [pairs of the file, 2] on the host; undefined: not known.
/// Copies to the device are asynchronous. Null: there are no pairs.
std::shared_ptr<const PreferenceBatch> make_preference_batch(
    const std::vector<std::vector<std::int64_t>>& pairs_of_rows, const DocumentBoundaries& boundaries,
    const at::Tensor& table, at::Device device);

}  // namespace phalanx::train
