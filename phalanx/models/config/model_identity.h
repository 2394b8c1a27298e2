// Everything about a model that changes the meaning of its weights, and how two descriptions of it differ. Torch-free.
//
// Weights fit into any model of the same shapes, whatever its number of heads, its rotary settings or its epsilon.
// Loaded into another model they give different results without an error. So wherever a model's description meets
// weights that come with their own description, the two are compared.
//
//   const auto differences = model_differences(of_the_weights, wanted);
//   if (!differences.empty()) throw CheckpointError(where + model_differences_text(differences));
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "phalanx/base/json_difference.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// Returns {"family": "llama", "n_heads": 4, "rope": {"theta": 10000.0, "scaling": "default"}, "activation": "silu",
/// ...}. What the family determines (activation, norms, biases) is written out. The sequence length is included only if
/// weights depend on it (learnt positions).
nlohmann::json model_identity(const LlamaConfig& config);

std::vector<JsonDifference> model_differences(const LlamaConfig& saved, const LlamaConfig& found);

/// Whether two such documents describe models whose parameters have the same names and shapes, so that the weights of
/// one can be loaded into the other.
bool have_same_shapes(const nlohmann::json& saved, const nlohmann::json& found);

/// One line per difference: "\n  n_heads: the weights were saved with 4, this model has 8".
std::string model_differences_text(const std::vector<JsonDifference>& differences);

}  // namespace phalanx::models
