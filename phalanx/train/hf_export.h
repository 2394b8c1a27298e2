// A trained model as a directory that transformers reads.
#pragma once

#include <filesystem>
#include <vector>

#include "phalanx/models/llama_config.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

/// Writes model.safetensors, config.json and the tokenizer's files of `assets` (empty: none) to the folder, which is
/// made; the path of the weights. Whole tensors, by the model's names.
std::filesystem::path export_in_hf(const std::filesystem::path& folder, const models::LlamaConfig& model,
                                   const std::vector<NamedTensor>& weights, const std::filesystem::path& assets);

}  // namespace phalanx::train
