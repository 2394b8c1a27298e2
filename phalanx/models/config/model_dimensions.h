// The model's dimensions that a parallel layout has to divide, for check() of layout/parallel_plan.h. Torch-free.
//
//   check(plan, model_dimensions(config, plan.tp, seq_len), world_size);
#pragma once

#include <cstdint>

#include "phalanx/layout/parallel_plan.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/models/config/vocabulary_split.h"

namespace phalanx::models {

inline ModelDimensions model_dimensions(const LlamaConfig& config, std::int64_t tp, std::int64_t seq_len) {
  return {.n_layers = config.n_layers,
          .n_heads = config.n_heads,
          .n_kv_heads = config.n_kv_heads,
          .ffn_hidden = config.ffn_hidden,
          .vocab_size = splits_vocabulary(config, tp) ? config.vocab_size : 0,  // 0: divided by any number
          .seq_len = seq_len,
          .experts = config.has_experts() ? config.experts : 0,
          .dense_hidden = config.dense_hidden};
}

}  // namespace phalanx::models
