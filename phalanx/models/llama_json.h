// The shape of a Llama model as JSON: what `phalanx train` keeps with a checkpoint, and Hugging Face's config.json.
// Knows no tensor.
//
//   const LlamaConfig config = llama_from_metadata(metadata.at("model"), "step-100/manifest.json: metadata.model");
//   write(folder / "config.json", llama_hf_config(config, "float32"));
//
// What is missing or has another type than it should is a CheckpointError that names the key.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "phalanx/models/llama_config.h"

namespace phalanx::models {

/// {"name": "llama", "dim": ..., ...}: enough to build the model again.
nlohmann::json llama_metadata(const LlamaConfig& config);
/// `where` begins the messages.
LlamaConfig llama_from_metadata(const nlohmann::json& model, const std::string& where);

/// The text of config.json for LlamaForCausalLM; `dtype` is torch's name of the weights' type.
std::string llama_hf_config(const LlamaConfig& config, const std::string& dtype);
/// From the text of config.json; what this model cannot do is refused by name.
LlamaConfig llama_config_from_hf(const std::string& text, const std::string& file);

/// Every parameter by its name, with its shape.
std::map<std::string, std::vector<std::int64_t>> llama_parameter_shapes(const LlamaConfig& config);

}  // namespace phalanx::models
