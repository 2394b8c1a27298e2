// Hugging Face's config.json for GPT-2, which has its own keys. Used by hf_config.h.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// Does not validate the result. A CheckpointError names the file and the key, what it should be and what it is.
LlamaConfig gpt2_config_from_hf(const nlohmann::json& json, const std::string& file);

/// Adds the keys that describe the model. The caller adds architecture, type and dtype.
void add_gpt2_keys(nlohmann::json& description, const LlamaConfig& config);

}  // namespace phalanx::models
