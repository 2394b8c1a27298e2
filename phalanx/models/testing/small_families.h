// For tests: a small model of each family.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// A configuration of each family, not tied. Mistral has a window of 4, Mixtral 3 experts of which a token uses 2.
inline std::vector<LlamaConfig> small_families(std::int64_t n_layers, std::int64_t max_seq_len) {
  std::vector<LlamaConfig> all;
  for (const auto family : {LlamaFamily::llama, LlamaFamily::mistral, LlamaFamily::qwen2, LlamaFamily::qwen3,
                            LlamaFamily::gpt2, LlamaFamily::mixtral}) {
    LlamaConfig config{.family = family,
                       .dim = 32,
                       .n_layers = n_layers,
                       .n_heads = 4,
                       .n_kv_heads = family == LlamaFamily::gpt2 ? 4 : 2,
                       .ffn_hidden = 40,
                       .vocab_size = 61,
                       .max_seq_len = max_seq_len};
    if (family == LlamaFamily::mistral) config.sliding_window = 4;
    if (family == LlamaFamily::mixtral) config.experts = 3, config.experts_per_token = 2;
    all.push_back(config);
  }
  return all;
}

}  // namespace phalanx::models
