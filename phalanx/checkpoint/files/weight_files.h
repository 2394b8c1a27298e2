// Finds the files that hold a model's weights. It does not use torch.
//
//   for (const auto& file : weight_files("Llama-3.2-1B").paths) open(file);   // of its index, or model.safetensors
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace phalanx {

struct WeightFiles {
  std::vector<std::filesystem::path> paths;
  std::map<std::string, std::filesystem::path> said;  // from an index: the file of each tensor
};

/// For a directory: the files of its index, else model.safetensors, else the only .safetensors file. A path that is not
/// a directory is returned as the file, whether it exists or not. Throws CheckpointError if a directory holds no
/// weights, or files of several models (weight_index.h).
WeightFiles weight_files(const std::filesystem::path& path);

/// For callers that make a model from its description in a file. Throws CheckpointError, before any memory is
/// allocated, if the weights at `path` have fewer bytes than the model has parameters. `told_by` is the file with the
/// description.
void refuse_more_parameters_than_bytes(const std::filesystem::path& path, std::int64_t parameters,
                                       const std::string& told_by);

}  // namespace phalanx
