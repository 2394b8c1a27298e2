#include "phalanx/checkpoint/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/block_writer.h"
#include "phalanx/checkpoint/box_copy.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/mismatch.h"
#include "phalanx/checkpoint/safetensors.h"
#include "phalanx/checkpoint/tensor_bytes.h"
#include "phalanx/checkpoint/weight_index.h"

namespace phalanx {
namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";

bool has_file(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

struct WeightFiles {
  std::vector<std::filesystem::path> paths;
  std::map<std::string, std::filesystem::path> said;  // by an index: where each tensor is
};

/// The files that an index names, each once, in order of name.
WeightFiles files_of_index(const std::filesystem::path& index) {
  WeightFiles files;
  for (const auto& [tensor, name] : parse_weight_index(index.string(), read_file(index, kMaxWeightIndexBytes))) {
    files.paths.push_back(index.parent_path() / name);
    files.said[tensor] = files.paths.back();
  }
  std::ranges::sort(files.paths);
  files.paths.erase(std::ranges::unique(files.paths).begin(), files.paths.end());
  for (const auto& file : files.paths) {
    if (!has_file(file))
      throw CheckpointError(
          fmt::format("{}: {} is named there but is not in the directory", index.string(), file.filename().string()));
  }
  return files;
}

WeightFiles weight_files(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return {.paths = {path}};  // opening it says what is wrong with it
  if (has_file(path / kIndexName)) return files_of_index(path / kIndexName);
  if (has_file(path / kSingleName)) return {.paths = {path / kSingleName}};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(path, error))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  if (files.size() != 1)
    throw CheckpointError(fmt::format("{}: expected {}, {} or one .safetensors file; found {} such files",
                                      path.string(), kIndexName, kSingleName, files.size()));
  return {.paths = std::move(files)};
}

/// Of the files that are there: a directory's safetensors, or the one file.
std::uint64_t bytes_on_disk(const std::filesystem::path& path) {
  std::error_code error;
  const auto size_of = [&](const std::filesystem::path& file) {
    const auto size = std::filesystem::file_size(file, error);
    return error ? 0 : size;
  };
  if (!std::filesystem::is_directory(path, error)) return size_of(path);
  std::uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path, error))
    if (entry.path().extension() == ".safetensors") bytes += size_of(entry.path());
  return bytes;
}

struct SourceTensor {
  const safetensors::File* file;
  const safetensors::TensorInfo* info;
  bool used = false;
};

std::string mapped(const NameMap& map, const std::string& name) { return map ? map(name) : name; }

LoadedWeights load_from_checkpoint(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors) {
  const CheckpointReader reader(path);
  LoadedWeights loaded;
  loaded.bytes = reader.read(with_prefix("model.", tensors), {.allow_unexpected = true, .convert_dtype = true}).taken;
  for (const auto& file : reader.manifest().files) loaded.files.push_back(path / file.name);
  return loaded;
}

}  // namespace

void refuse_more_parameters_than_bytes(const std::filesystem::path& path, std::int64_t parameters,
                                       const std::string& told_by) {
  const std::uint64_t bytes = bytes_on_disk(path);
  if (parameters >= 0 && static_cast<std::uint64_t>(parameters) <= bytes) return;
  throw CheckpointError(fmt::format(
      "{}: tells of a model of {} parameters, but the weights in {} have {} bytes: they are not of this model, or not "
      "whole",
      told_by, parameters, path.string(), bytes));
}

LoadedWeights load_weights(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                           const LoadWeightsOptions& options) {
  if (has_file(path / kManifestName)) return load_from_checkpoint(path, tensors);

  const WeightFiles found_files = weight_files(path);
  LoadedWeights loaded{.files = found_files.paths};
  std::vector<safetensors::File> files;
  for (const auto& file : loaded.files) files.emplace_back(file.string());
  std::unordered_map<std::string, SourceTensor> sources;
  for (const auto& file : files) {
    for (const auto& info : file.tensors()) {
      const auto [other, inserted] = sources.try_emplace(info.name, SourceTensor{&file, &info});
      if (!inserted)
        throw CheckpointError(fmt::format("tensor {} is in both {} and {}", safetensors::quote_name(info.name),
                                          other->second.file->path(), file.path()));
    }
  }

  for (const auto& [name, file] : found_files.said) {
    const auto found = sources.find(name);
    if (found == sources.end() || found->second.file->path() != file.string())
      throw CheckpointError(fmt::format("{}: tensor {} is said to be in {}, which does not have it",
                                        (path / kIndexName).string(), safetensors::quote_name(name),
                                        file.filename().string()));
  }

  Mismatches mismatches;
  std::vector<SourceTensor> chosen;
  for (const auto& named : tensors) {
    auto wanted = describe_tensor(named);
    wanted.name = mapped(options.name_in_file, named.name);
    const auto found = sources.find(wanted.name);
    if (found == sources.end()) {
      mismatches.missing(wanted);
      continue;
    }
    if (found->second.info->shape != wanted.shape) mismatches.differs(wanted, *found->second.info);
    found->second.used = true;
    chosen.push_back(found->second);
  }
  for (const auto& file : files) {
    for (const auto& info : file.tensors()) {
      if (!sources.at(info.name).used && !(options.ignore && options.ignore(info.name))) mismatches.unexpected(info);
    }
  }
  mismatches.throw_if_any(fmt::format("the weights in {} do not fit this model", path.string()));

  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [file, info, used] = chosen[i];
    const Box whole{std::vector<std::int64_t>(info->shape.size(), 0), info->shape};
    loaded.bytes += fill_tensor(tensors[i], info->dtype, [&](const Box& box, std::span<std::byte> target) {
      return copy_common(whole, file->bytes(*info), box, target, safetensors::element_size(info->dtype));
    });
  }
  return loaded;
}

void export_weights(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                    const ExportWeightsOptions& options, FileSystem& fs) {
  const auto convert = [&](const at::Tensor& tensor) {
    return options.dtype && tensor.is_floating_point() ? tensor.detach().to(*options.dtype) : tensor;
  };
  std::vector<safetensors::TensorInfo> infos;
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& named : tensors) {
    auto info = describe_tensor(named);
    if (held_box(named).shape != info.shape)
      throw CheckpointError(
          fmt::format("cannot write tensor {} to {}: this rank has only {} of {}; save a checkpoint and run `phalanx "
                      "checkpoint consolidate` on it",
                      safetensors::quote_name(named.name), path.string(), held_box(named).text(), describe_type(info)));
    info.name = mapped(options.name_in_file, named.name);
    if (options.dtype && named.tensor.is_floating_point())
      info.dtype = describe_tensor({named.name, named.tensor.detach().new_empty({1}, *options.dtype)}).dtype;
    by_name[info.name] = named.tensor;
    infos.push_back(std::move(info));
  }
  auto metadata = options.metadata;
  metadata.insert_or_assign("format", "pt");
  const auto header = safetensors::make_header(std::move(infos), std::move(metadata));

  auto temporary = path;
  temporary += ".tmp";
  try {
    BlockWriter writer(fs, temporary);
    const auto text = safetensors::format_header(header);
    writer.append(std::as_bytes(std::span(text)));
    for (const auto& info : header.tensors) {
      const auto tensor = convert(by_name.at(info.name));  // one converted tensor alive at a time
      read_tensor_rows(tensor, 0, tensor.dim() == 0 ? 1 : tensor.size(0),
                       [&](std::span<const std::byte> bytes) { writer.append(bytes); });
    }
    writer.finish();
    fs.rename(temporary, path);
  } catch (const Error&) {
    try {
      fs.remove_all(temporary);
    } catch (const std::exception&) {  // the first error is the one to report
    }
    throw;
  }
  fs.sync_directory(path.parent_path().empty() ? std::filesystem::path(".") : path.parent_path());
}

}  // namespace phalanx
