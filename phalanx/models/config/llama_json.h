// A LlamaConfig as JSON, as `phalanx train` saves it with a checkpoint. Torch-free.
//
//   const LlamaConfig config = llama_from_metadata(metadata.at("model"), "step-100/manifest.json: metadata.model");
//
// A missing key, or one of the wrong type, throws a CheckpointError that names the key.
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
/// `where` begins the error messages.
LlamaConfig llama_from_metadata(const nlohmann::json& model, const std::string& where);
/// The same from "model" of the metadata of a checkpoint, `where`. What validate() refuses is a CheckpointError too.
LlamaConfig llama_from_checkpoint(const nlohmann::json& model, const std::string& where);

/// Hugging Face's names: "default", "linear", "dynamic", "llama3".
const char* rope_scaling_name(RopeScalingType type);
std::optional<RopeScalingType> rope_scaling_from_name(std::string_view name);

/// Maps every parameter's name to its shape.
std::map<std::string, std::vector<std::int64_t>> llama_parameter_shapes(const LlamaConfig& config);
/// Of all that its weights are in files: the parameters, and biases of experts if the family has them.
std::map<std::string, std::vector<std::int64_t>> llama_weight_shapes(const LlamaConfig& config);

}  // namespace phalanx::models
