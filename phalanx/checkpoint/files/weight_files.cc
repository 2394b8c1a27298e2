#include "phalanx/checkpoint/files/weight_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/files/weight_index.h"

namespace phalanx {
namespace {

bool has_file(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

/// The files that an index names, each once, in order of name.
WeightFiles files_of_index(const std::filesystem::path& index) {
  WeightFiles files;
  for (const auto& [tensor, name] : parse_weight_index(index.string(), read_file(index, kMaxWeightIndexBytes))) {
    files.paths.push_back(index.parent_path() / name);
    files.said[tensor] = files.paths.back();
  }
  std::ranges::sort(files.paths);
  files.paths.erase(std::unique(files.paths.begin(), files.paths.end()), files.paths.end());
  for (const auto& file : files.paths) {
    if (!has_file(file))
      throw CheckpointError(
          fmt::format("{}: {} is named there but is not in the directory", index.string(), file.filename().string()));
  }
  return files;
}

/// The files that load_weights() would read, also of a checkpoint.
std::vector<std::filesystem::path> files_of(const std::filesystem::path& path) {
  if (!has_file(path / kManifestName)) return weight_files(path).paths;
  std::vector<std::filesystem::path> files;
  const Manifest manifest = read_step_manifest(path);
  for (const auto& file : manifest.files) files.push_back(path / file.name);
  return files;
}

}  // namespace

WeightFiles weight_files(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return {.paths = {path}};  // opening it reports what is wrong
  require_one_model(path);
  if (has_file(path / kWeightIndexName)) return files_of_index(path / kWeightIndexName);
  if (has_file(path / kSingleWeightsName)) return {.paths = {path / kSingleWeightsName}};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(path, error))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  if (files.size() != 1)
    throw CheckpointError(fmt::format("{}: expected {}, {} or one .safetensors file; found {} such files",
                                      path.string(), kWeightIndexName, kSingleWeightsName, files.size()));
  return {.paths = std::move(files)};
}

void refuse_more_parameters_than_bytes(const std::filesystem::path& path, std::int64_t parameters,
                                       const std::string& told_by) {
  const auto files = files_of(path);
  std::uint64_t bytes = 0;
  for (const auto& file : files) {
    std::error_code error;
    const auto size = std::filesystem::file_size(file, error);
    if (!error) bytes += size;
  }
  if (parameters >= 0 && static_cast<std::uint64_t>(parameters) <= bytes) return;
  for (const auto& file : files) const safetensors::File is_whole(file.string());  // throws if it is not
  throw CheckpointError(fmt::format(
      "{}: tells of a model of {} parameters, but the weights in {} have {} bytes: they are not of this model, or not "
      "whole",
      told_by, parameters, path.string(), bytes));
}

}  // namespace phalanx
