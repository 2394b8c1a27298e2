// For tests: a small model of each family.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// A configuration of each family, not tied. Windows are of 4 positions; of 3 experts a token uses 2.
inline std::vector<LlamaConfig> small_families(std::int64_t n_layers, std::int64_t max_seq_len) {
  std::vector<LlamaConfig> all;
  for (const auto family : all_families()) {
    LlamaConfig config{.family = family,
                       .dim = 32,
                       .n_layers = n_layers,
                       .n_heads = 4,
                       .n_kv_heads = family == LlamaFamily::gpt2 ? 4 : 2,
                       .ffn_hidden = 40,
                       .vocab_size = 61,
                       .max_seq_len = max_seq_len};
    if (family == LlamaFamily::mistral || family == LlamaFamily::gemma3_text) config.sliding_window = 4;
    if (config.has_experts()) config.experts = 3, config.experts_per_token = 2;
    if (family == LlamaFamily::qwen3_moe) config.normalise_routing = false;
    if (family == LlamaFamily::smollm3) config.unrotated_layers = {n_layers - 1};
    if (family == LlamaFamily::phi3) config.rotary_dim = 6;
    if (family == LlamaFamily::gemma3_text) {
      config.own_head_dim = 12;
      config.query_scalar = 20;
      config.window_rope_theta = 100.0;
      if (n_layers > 1) config.full_layers = {n_layers - 1};
    }
    all.push_back(config);
  }
  return all;
}

}  // namespace phalanx::models
