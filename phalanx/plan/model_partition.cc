#include "phalanx/plan/model_partition.h"

#include <algorithm>

#include "phalanx/models/config/vocabulary_split.h"

namespace phalanx::plan {

ModelPartition::ModelPartition(const TrainingShape& shape)
    : dim(shape.model.dim),
      heads(shape.model.n_heads / shape.tensor_parallel_size),
      queries(heads * shape.model.head_dim()),
      keys(std::max<std::int64_t>(shape.model.n_kv_heads / shape.tensor_parallel_size, 1) * shape.model.head_dim()),
      feed_forward_hidden(shape.model.ffn_hidden / shape.tensor_parallel_size),
      vocab(models::splits_vocabulary(shape.model, shape.tensor_parallel_size)
                ? shape.model.vocab_size / shape.tensor_parallel_size
                : shape.model.vocab_size),
      norm(shape.model.is_gpt2() ? 2 * dim : dim),
      norms(shape.model.norms_per_layer() / 2 * norm),
      q_norm(shape.model.traits().qk_norm == QkNorm::all_heads ? queries
             : shape.model.has_qk_norm()                       ? shape.model.head_dim()
                                                               : 0),
      k_norm(shape.model.traits().qk_norm == QkNorm::all_heads ? keys : q_norm),
      biases_and_norms((shape.model.has_qkv_bias() ? queries + 2 * keys : 0) +
                       (shape.model.has_output_bias() ? dim : 0) + (shape.model.has_sinks() ? heads : 0) + q_norm +
                       k_norm),
      nets(shape.model.has_experts() ? shape.model.experts / shape.expert_parallel_size : 1),
      matrices_of_net(shape.model.ffn_matrices()),
      biases_of_net(shape.model.is_gpt2()                 ? feed_forward_hidden + dim
                    : shape.model.has_expert_net_biases() ? nets * (2 * feed_forward_hidden + dim)
                                                          : 0),
      gates(shape.model.experts * (shape.model.has_expert_net_biases() ? dim + 1 : dim)),
      experts(shape.model.experts),
      routed(shape.model.has_experts() ? shape.model.experts_per_token : 1),
      shared_hidden(shape.model.shared_units() / shape.tensor_parallel_size),
      dense_layers(shape.model.dense_layers),
      dense_hidden(shape.model.dense_hidden / shape.tensor_parallel_size),
      q_rank(shape.model.q_lora_rank),
      kv_rank(shape.model.kv_lora_rank),
      rotated(shape.model.has_latent_attention() ? shape.model.rotary_dim : 0),
      values(heads * shape.model.value_dim()),
      positions(shape.model.is_gpt2() ? shape.model.max_seq_len * dim : 0) {}

std::int64_t ModelPartition::projections() const {
  if (kv_rank == 0) return dim * (2 * queries + 2 * keys);
  const std::int64_t of_queries = q_rank == 0 ? dim * queries : dim * q_rank + q_rank + q_rank * queries;
  return of_queries + dim * (kv_rank + rotated) + kv_rank + kv_rank * (queries - heads * rotated + values) +
         values * dim;
}

std::int64_t ModelPartition::parameters(const models::LlamaPart& part, bool tied) const {
  std::int64_t sum = 0;
  for (std::int64_t half = part.begin; half < part.end; ++half) {
    sum += half % 2 == 0 ? attention() : half / 2 < dense_layers ? dense_feed_forward() : feed_forward();
  }
  if (part.head) sum += norm;
  const bool shares = tied && part.embedding;
  return sum + (part.embedding ? table() + positions : 0) + (part.head && !shares ? table() : 0);
}

std::int64_t ModelPartition::expert_parameters(const models::LlamaPart& part) const {
  const std::int64_t first = std::max(part.begin / 2, dense_layers);
  return experts == 0 ? 0 : std::max<std::int64_t>(part.end / 2 - first, 0) * (feed_forward_matrices() + biases_of_net);
}

}  // namespace phalanx::plan
