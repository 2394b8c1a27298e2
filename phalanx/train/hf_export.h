// A trained model as a directory that transformers reads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

struct HfExportOptions {
  std::filesystem::path assets;                  // of the tokenizer's files; empty: none
  std::string metadata = {};                     // a checkpoint's: what of it may go out goes into the files' headers
  std::string dtype = "float32";                 // of the weights: float32, bfloat16, float16
  std::uint64_t max_file_bytes = 5'000'000'000;  // more than that: several files and their index
};

/// Writes the weights and what stands beside them (checkpoint/files/hf_files.h) to the folder, which is made; the paths of
/// the weights. Whole tensors, by the model's names.
std::vector<std::filesystem::path> export_in_hf(const std::filesystem::path& folder, const models::LlamaConfig& model,
                                                const std::vector<NamedTensor>& weights,
                                                const HfExportOptions& options = {});

}  // namespace phalanx::train
