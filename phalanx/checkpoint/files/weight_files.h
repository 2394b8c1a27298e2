// The files that hold a model's weights. Knows no torch tensor.
//
//   for (const auto& file : weight_files("Llama-3.2-1B").paths) ...   // those of its index, or model.safetensors
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace phalanx {

struct WeightFiles {
  std::vector<std::filesystem::path> paths;
  std::map<std::string, std::filesystem::path> said;  // by an index: where each tensor is
};

/// Of a directory: the files of its index, else model.safetensors, else the only .safetensors file that there is. A
/// path that is no directory is the file itself, there or not. CheckpointError where a directory holds none, or files
/// of several models (weight_index.h).
WeightFiles weight_files(const std::filesystem::path& path);

/// For who makes a model from what a file tells of it: CheckpointError, before any memory is taken, where the weights
/// at `path` have fewer bytes than the model has parameters. `told_by` is the file that tells of it.
void refuse_more_parameters_than_bytes(const std::filesystem::path& path, std::int64_t parameters,
                                       const std::string& told_by);

}  // namespace phalanx
