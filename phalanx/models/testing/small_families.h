// For tests: a small model of each family.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// A small DeepSeek of this one's width and layers: four experts in two groups, and a first layer without experts.
inline LlamaConfig with_latent_parts(LlamaConfig config) {
  config.n_kv_heads = config.n_heads;
  config.own_head_dim = 12;
  config.rotary_dim = 4;
  config.v_head_dim = 8;
  config.kv_lora_rank = 12;
  config.q_lora_rank = config.family == LlamaFamily::deepseek_v3 ? 20 : 0;
  config.experts = 4;
  config.experts_per_token = 2;
  config.expert_groups = 2;
  config.groups_per_token = 1;
  config.shared_experts = 1;
  config.routed_scaling = 1.5;
  if (config.n_layers > 1) config.dense_layers = 1, config.dense_hidden = 48;
  return config;
}

/// Heads of 12, windows of 4 positions in every second layer, and a limit that activations reach.
inline void with_gpt_oss_parts(LlamaConfig& config) {
  config.own_head_dim = 12;
  config.activation_limit = 0.05;
  config.sliding_window = 4;
  config.full_layers.clear();
  for (std::int64_t layer = 1; layer < config.n_layers; layer += 2) config.full_layers.push_back(layer);
}

inline void with_multipliers(LlamaConfig& config) {
  config.embedding_multiplier = 3.0;
  config.residual_multiplier = 0.4;
  config.attention_multiplier = 0.2;
  config.logits_scaling = 2.5;
}

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
    if (family == LlamaFamily::gpt_oss) with_gpt_oss_parts(config);
    if (family == LlamaFamily::granite) with_multipliers(config);
    if (family == LlamaFamily::smollm3) config.unrotated_layers = {n_layers - 1};
    if (family == LlamaFamily::phi3) config.rotary_dim = 6;
    if (family == LlamaFamily::gemma3_text) {
      config.own_head_dim = 12;
      config.query_scalar = 20;
      config.window_rope_theta = 100.0;
      if (n_layers > 1) config.full_layers = {n_layers - 1};
    }
    all.push_back(config.has_latent_attention() ? with_latent_parts(config) : config);
  }
  return all;
}

}  // namespace phalanx::models
