// For tests: a small Llama as config.json describes it. No number is a default.
#pragma once

#include <nlohmann/json.hpp>

namespace phalanx::models {

inline nlohmann::json tiny_hf_config() {
  return {{"model_type", "llama"},
          {"hidden_size", 16},
          {"num_hidden_layers", 1},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 1},
          {"intermediate_size", 24},
          {"vocab_size", 31},
          {"max_position_embeddings", 12},
          {"rms_norm_eps", 3e-5},
          {"rope_theta", 20000.0},
          {"tie_word_embeddings", false},
          {"rope_scaling", nullptr}};
}

}  // namespace phalanx::models
