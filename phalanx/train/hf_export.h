// Exports a trained model as a directory that Hugging Face transformers can read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

struct HfExportOptions {
  std::filesystem::path assets;                  // folder of the tokenizer's files; empty: none
  std::string metadata = {};                     // of a checkpoint; its publishable part goes into the files' headers
  std::string dtype = "float32";                 // of the weights: float32, bfloat16, float16
  std::uint64_t max_file_bytes = 5'000'000'000;  // if the weights are larger: several files and their index
};

/// Creates the folder and writes the weights and the files that accompany them (checkpoint/files/hf_files.h). Returns
/// the paths of the weight files.
/// REQUIRES: `weights` are full tensors, named as in the model.
std::vector<std::filesystem::path> export_in_hf(const std::filesystem::path& folder, const models::LlamaConfig& model,
                                                const std::vector<NamedTensor>& weights,
                                                const HfExportOptions& options = {});

}  // namespace phalanx::train
