// What one rank of a tensor group, and one stage of a pipeline, has of a Llama: for memory_model.h.
#pragma once

#include <cstdint>

#include "phalanx/models/llama_part.h"
#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

/// Numbers of a rank, each divided by the tensor group's ranks; key-value heads that are fewer than these are repeated.
struct CutModel {
  explicit CutModel(const TrainingShape& shape);

  std::int64_t table() const { return vocab * dim; }  // of the embedding, and of the output
  std::int64_t attention() const { return dim * (2 * queries + 2 * keys) + dim + biases_and_norms; }
  std::int64_t feed_forward() const { return 3 * dim * feed_forward_hidden + dim; }
  /// Parameters of a part. A part of both ends has tied embeddings once.
  std::int64_t parameters(const models::LlamaPart& part, bool tied) const;

  std::int64_t dim, heads, queries, keys, feed_forward_hidden, vocab;
  std::int64_t biases_and_norms;  // of queries, keys and values, in one layer
};

}  // namespace phalanx::plan
