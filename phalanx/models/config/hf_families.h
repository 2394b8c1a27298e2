// What Hugging Face's config.json and files say of each family: one row each. Torch-free. Used by hf_config.h,
// hf_unsupported.h and hf_names.h.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "phalanx/models/config/hf_config_file.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

struct HfFamily {
  LlamaFamily family;
  const char* architecture;  // the class of transformers that reads it
  /// Keys that are read beside those that all families like Llama have.
  std::vector<std::string_view> keys = {};
  // transformers' defaults
  double norm_eps = 1e-6;
  double rope_theta = 10000.0;
  bool tied = false;
  std::int64_t head_dim = 0;        // 0: hidden_size / num_attention_heads
  bool experts_have_units = false;  // intermediate_size is of layers without experts, if there are such
  bool kv_heads_default = false;    // num_key_value_heads may be missing: as many as query heads
  const char* activation_key = "hidden_act";
  const char* activation = "silu";
  /// Reads and writes what only this family has. `config` has what Llama has, but for the rotary settings.
  void (*read)(const HfConfigFile& file, LlamaConfig& config) = nullptr;
  void (*write)(nlohmann::json& description, const LlamaConfig& config) = nullptr;
  /// Names in a layer that are not Llama's: ours and theirs. A name that ends in a dot stands for a list of experts.
  std::vector<std::pair<std::string_view, std::string_view>> names = {};
};

const HfFamily& hf_family(LlamaFamily family);

}  // namespace phalanx::models
