// config.json of Hugging Face's GPT-2, whose keys are its own: for hf_config.h.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// Not validated. CheckpointError names the file and the key, what it should be and what it is.
LlamaConfig gpt2_config_from_hf(const nlohmann::json& json, const std::string& file);

/// The keys that describe the model; architecture, type and dtype are the caller's.
void add_gpt2_keys(nlohmann::json& description, const LlamaConfig& config);

}  // namespace phalanx::models
