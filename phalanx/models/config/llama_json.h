// The shape of a Llama model as JSON, as `phalanx train` keeps it with a checkpoint. Knows no tensor.
//
//   const LlamaConfig config = llama_from_metadata(metadata.at("model"), "step-100/manifest.json: metadata.model");
//
// What is missing or has another type than it should is a CheckpointError that names the key.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// {"name": "llama", "dim": ..., ...}: enough to build the model again.
nlohmann::json llama_metadata(const LlamaConfig& config);
/// `where` begins the messages.
LlamaConfig llama_from_metadata(const nlohmann::json& model, const std::string& where);

/// Hugging Face's names: "default", "linear", "dynamic", "llama3".
const char* rope_scaling_name(RopeScalingType type);
std::optional<RopeScalingType> rope_scaling_from_name(std::string_view name);

/// Every parameter by its name, with its shape.
std::map<std::string, std::vector<std::int64_t>> llama_parameter_shapes(const LlamaConfig& config);

}  // namespace phalanx::models
