// The part of a Llama on one rank of a tensor-parallel group and one stage of a pipeline. For memory_model.h.
#pragma once

#include <cstdint>

#include "phalanx/models/config/llama_part.h"
#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

/// The dimensions on one rank, each divided by the tensor-parallel size. If there are fewer key-value heads than ranks,
/// they are repeated. Norms of hidden states and of single heads, positions, gates and the biases of row-parallel
/// layers are not cut. Of experts that are divided among ranks it has its own.
struct ModelPartition {
  explicit ModelPartition(const TrainingShape& shape);

  std::int64_t table() const { return vocab * dim; }  // of the embedding, and of the output
  std::int64_t attention() const { return projections() + norms + biases_and_norms; }
  std::int64_t projections() const;  // of queries, keys, values and results; latent attention's with their norms
  /// Of a layer with experts, if the model has experts.
  std::int64_t feed_forward() const {
    return feed_forward_matrices() + shared_matrices() + gates + norms + biases_of_net;
  }
  std::int64_t shared_matrices() const { return matrices_of_net * dim * shared_hidden; }  // of the net beside experts
  std::int64_t dense_feed_forward() const { return matrices_of_net * dim * dense_hidden + norms; }
  std::int64_t feed_forward_matrices() const { return nets * matrices_of_net * dim * feed_forward_hidden; }
  /// Parameters of a part. A part with both ends of the model has tied embeddings once.
  std::int64_t parameters(const models::LlamaPart& part, bool tied) const;
  /// Of these, those of experts.
  std::int64_t expert_parameters(const models::LlamaPart& part) const;

  std::int64_t dim, heads, queries, keys, feed_forward_hidden, vocab;
  std::int64_t norm;              // one of the hidden states
  std::int64_t norms;             // in one half of a layer
  std::int64_t q_norm, k_norm;    // in one layer
  std::int64_t biases_and_norms;  // in one layer: of queries, keys and values, and of the projection after them; sinks
  std::int64_t nets, matrices_of_net;             // in one layer: experts of the rank, or one net
  std::int64_t biases_of_net, gates;              // in one layer: of all these nets; of the router, with its bias
  std::int64_t experts;                           // in one layer, of all ranks
  std::int64_t routed;                            // nets that process a token
  std::int64_t shared_hidden;                     // units of a net beside the experts
  std::int64_t dense_layers, dense_hidden;        // at the beginning, and their units
  std::int64_t q_rank, kv_rank, rotated, values;  // latent attention; values: of all heads
  std::int64_t positions;                         // learnt
};

}  // namespace phalanx::plan
