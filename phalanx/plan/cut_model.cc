#include "phalanx/plan/cut_model.h"

#include <algorithm>

namespace phalanx::plan {

CutModel::CutModel(const TrainingShape& shape)
    : dim(shape.model.dim),
      heads(shape.model.n_heads / shape.tensor_ranks),
      queries(heads * shape.model.head_dim()),
      keys(std::max<std::int64_t>(shape.model.n_kv_heads / shape.tensor_ranks, 1) * shape.model.head_dim()),
      feed_forward_hidden(shape.model.ffn_hidden / shape.tensor_ranks),
      vocab(shape.model.vocab_size / shape.tensor_ranks),
      biases_and_norms((shape.model.has_qkv_bias() ? queries + 2 * keys : 0) +
                       (shape.model.has_qk_norm() ? 2 * shape.model.head_dim() : 0)) {}

std::int64_t CutModel::parameters(const models::LlamaPart& part, bool tied) const {
  std::int64_t sum = 0;
  for (std::int64_t half = part.begin; half < part.end; ++half) sum += half % 2 == 0 ? attention() : feed_forward();
  if (part.head) sum += dim;
  const bool shares = tied && part.embedding;
  return sum + (part.embedding ? table() : 0) + (part.head && !shares ? table() : 0);
}

}  // namespace phalanx::plan
