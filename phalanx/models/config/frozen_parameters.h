// Which parameters of a model a run does not train. Torch-free.
//
//   frozen_parameters(config, {"tok_embeddings*", "layers.[0-3].*"}, {});   // names that match
//   frozen_parameters(config, {}, {.rank = 8});                            // all but the adapters
#pragma once

#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"
#include "phalanx/models/config/lora_config.h"

namespace phalanx::models {

/// In alphabetical order. ConfigError for a pattern that matches none, if nothing is left to be trained, and as of
/// lora_layers().
std::vector<std::string> frozen_parameters(const LlamaConfig& config, const std::vector<std::string>& patterns,
                                           const LoraOptions& lora);

}  // namespace phalanx::models
