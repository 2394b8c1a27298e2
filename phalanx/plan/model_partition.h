// What one rank of a tensor group, and one stage of a pipeline, has of a Llama: for memory_model.h.
#pragma once

#include <cstdint>

#include "phalanx/models/config/llama_part.h"
#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

/// Numbers of a rank, each divided by the tensor group's ranks; key-value heads that are fewer than these are repeated.
/// Norms, positions, gates and the biases behind what is cut by columns are whole.
struct ModelPartition {
  explicit ModelPartition(const TrainingShape& shape);

  std::int64_t table() const { return vocab * dim; }  // of the embedding, and of the output
  std::int64_t attention() const { return dim * (2 * queries + 2 * keys) + norm + biases_and_norms; }
  std::int64_t feed_forward() const { return feed_forward_matrices() + gates + norm + biases_of_net; }
  std::int64_t feed_forward_matrices() const { return nets * matrices_of_net * dim * feed_forward_hidden; }
  /// Parameters of a part. A part of both ends has tied embeddings once.
  std::int64_t parameters(const models::LlamaPart& part, bool tied) const;

  std::int64_t dim, heads, queries, keys, feed_forward_hidden, vocab;
  std::int64_t norm;              // of a layer
  std::int64_t biases_and_norms;  // of queries, keys and values, and of the projection behind them, in one layer
  std::int64_t nets, matrices_of_net, biases_of_net, gates;  // in one layer: experts, or one
  std::int64_t routed;                                       // nets that a token goes through
  std::int64_t positions;                                    // learnt
};

}  // namespace phalanx::plan
