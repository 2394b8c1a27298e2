// Trained weights in the form that Hugging Face's LlamaForCausalLM reads.
#pragma once

#include <filesystem>
#include <vector>

#include "phalanx/models/llama_config.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

/// Writes model.safetensors and config.json to the folder, which is made; the path of the weights. Whole tensors, by
/// the model's names.
std::filesystem::path export_in_hf(const std::filesystem::path& folder, const models::LlamaConfig& model,
                                   const std::vector<NamedTensor>& weights);

}  // namespace phalanx::train
