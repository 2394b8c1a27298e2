// What the names of parameters say: which are matrices inside of blocks, and which are of experts. Torch-free.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/base/name_patterns.h"

namespace phalanx::models {

/// Whether a parameter of so many dimensions is a matrix of a block, of its adapters and experts too, and no router.
/// Embeddings and the output layer are in no block.
inline bool is_block_matrix(std::string_view name, std::size_t dimensions) {
  return dimensions == 2 && name.starts_with("layers.") && !name.ends_with(".gate.weight");
}

/// Whether Muon steps it in a run with this [muon] adamw_params, which are patterns of names.
inline bool is_muon_matrix(const std::string& name, std::size_t dimensions,
                           const std::vector<std::string>& adamw_params) {
  const auto matches = [&](const std::string& pattern) { return matches_pattern(pattern, name); };
  return is_block_matrix(name, dimensions) && std::ranges::none_of(adamw_params, matches);
}

/// Whether it is of an expert of a mixture, and not of the router.
inline bool is_expert_parameter(std::string_view name) { return name.find(".moe.experts.") != name.npos; }

/// Whether it is a bias by which experts are chosen (models/expert_bias.h):
/// no parameter, but in checkpoints beside them.
inline bool is_expert_bias(std::string_view name) { return name.ends_with(".moe.expert_bias"); }

}  // namespace phalanx::models
