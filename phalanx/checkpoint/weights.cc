#include "phalanx/checkpoint/weights.h"

#include <ATen/ops/cat.h>
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/block_writer.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/mismatch.h"
#include "phalanx/checkpoint/place_copy.h"
#include "phalanx/checkpoint/safetensors.h"
#include "phalanx/checkpoint/saved_state.h"
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

/// The files that load_weights() would read from.
std::vector<std::filesystem::path> files_of(const std::filesystem::path& path) {
  if (!has_file(path / kManifestName)) return weight_files(path).paths;
  std::vector<std::filesystem::path> files;
  const Manifest manifest = read_step_manifest(path);
  for (const auto& file : manifest.files) files.push_back(path / file.name);
  return files;
}

struct SourceTensor {
  const safetensors::File* file;
  const safetensors::TensorInfo* info;
  bool used = false;
};

PlaceInFile placed(const PlaceMap& map, const std::string& name) { return map ? map(name) : PlaceInFile(name); }

/// `part` begins with it, if it is not empty.
std::string without_prefix(const std::string& name, const std::string& prefix) {
  return !prefix.empty() && name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

LoadedWeights load_from_checkpoint(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors) {
  const CheckpointReader reader(path);
  LoadedWeights loaded;
  loaded.bytes = reader.read(with_prefix("model.", tensors), {.allow_unexpected = true, .convert_dtype = true}).taken;
  for (const auto& file : reader.manifest().files) loaded.files.push_back(path / file.name);
  return loaded;
}

/// A tensor of a file that is written: one of the model's, or several that are parts of it.
class FileTensor {
 public:
  void add(const PlaceInFile& place, const at::Tensor& tensor) {
    const auto [part, is_new] = parts_.emplace(place.form.part, tensor);
    const bool fits = is_new && (parts_.size() == 1 || form_.parts == place.form.parts);
    if (!fits) {
      throw CheckpointError(
          fmt::format("two tensors are to be written under the name {}", safetensors::quote_name(place.name)));
    }
    form_ = place.form;
  }

  safetensors::TensorInfo info(const std::string& name, const std::optional<at::ScalarType>& dtype) const {
    const at::Tensor& first = parts_.begin()->second;
    if (static_cast<std::int64_t>(parts_.size()) != form_.parts) {
      throw CheckpointError(
          fmt::format("cannot write tensor {}: {} of the {} parts that it is put together from are "
                      "there",
                      safetensors::quote_name(name), parts_.size(), form_.parts));
    }
    const auto type = dtype && first.is_floating_point() ? *dtype : first.scalar_type();
    auto info = describe_tensor({name, first.detach().new_empty({1}, type)});
    info.shape = shape_in_file(form_, first.sizes().vec());
    return info;
  }

  at::Tensor whole(const std::optional<at::ScalarType>& dtype) const {
    at::Tensor tensor = parts_.begin()->second.detach();
    if (form_.parts > 1) {
      std::vector<at::Tensor> all;
      for (const auto& [number, part] : parts_) all.push_back(part.detach());
      tensor = at::cat(all);
    }
    if (dtype && tensor.is_floating_point()) tensor = tensor.to(*dtype);
    return form_.transposed ? tensor.t().contiguous() : tensor;
  }

 private:
  PlaceInFile::Form form_;
  std::map<std::int64_t, at::Tensor> parts_;  // by their numbers
};

}  // namespace

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
  for (const auto& file : files) const safetensors::File is_whole(file.string());  // or says what is wrong with it
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
  std::vector<std::pair<SourceTensor, PlaceInFile::Form>> chosen;
  for (const auto& named : tensors) {
    auto wanted = describe_tensor(named);
    const PlaceInFile place = placed(options.place_in_file, named.name);
    wanted.name = place.name;
    wanted.shape = shape_in_file(place.form, wanted.shape);
    auto found = sources.find(place.name);
    if (found == sources.end()) found = sources.find(without_prefix(place.name, options.optional_prefix));
    if (found == sources.end()) {
      mismatches.missing(wanted);
      continue;
    }
    const auto& there = *found->second.info;
    const bool same_kind =
        at::isFloatingType(scalar_type_of(there.dtype)) == at::isFloatingType(scalar_type_of(wanted.dtype));
    if (there.shape != wanted.shape || !same_kind) mismatches.differs(wanted, there);
    found->second.used = true;
    chosen.emplace_back(found->second, place.form);
  }
  for (const auto& file : files) {
    for (const auto& info : file.tensors()) {
      const auto may_stay = [&](const std::string& name) { return options.ignore && options.ignore(name); };
      if (sources.at(info.name).used || may_stay(info.name) || may_stay(options.optional_prefix + info.name)) continue;
      mismatches.unexpected(info);
    }
  }
  mismatches.throw_if_any(fmt::format("the weights in {} do not fit this model", path.string()));

  const auto ask_for = [&](std::size_t i) {  // while the one before it is copied
    if (i == tensors.size()) return;
    const auto& [source, form] = chosen[i];
    const auto& info = *source.info;
    if (form.transposed || form.parts > 1) return;
    const auto ranges = flat_ranges(held_box(tensors[i]), info.shape);
    if (ranges.size() != 1) return;  // not whole rows: what lies between them is not this rank's to read
    const auto size = safetensors::element_size(info.dtype);
    source.file->will_need(source.file->bytes(info).subspan(static_cast<std::size_t>(ranges[0].begin) * size,
                                                            static_cast<std::size_t>(ranges[0].length) * size));
  };
  ask_for(0);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    ask_for(i + 1);
    const auto& [source, form] = chosen[i];
    const auto& info = *source.info;
    const std::span<const std::byte> bytes = source.file->bytes(info);
    const auto shape = tensors[i].global_shape();
    loaded.bytes += fill_tensor(tensors[i], info.dtype, [&](const Box& box, std::span<std::byte> target) {
      return copy_from_place(form, shape, bytes, box, target, safetensors::element_size(info.dtype));
    });
  }
  return loaded;
}

void export_weights(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                    const ExportWeightsOptions& options, FileSystem& fs) {
  std::map<std::string, FileTensor> of_file;
  for (const auto& named : tensors) {
    const auto info = describe_tensor(named);
    if (held_box(named).shape != info.shape)
      throw CheckpointError(
          fmt::format("cannot write tensor {} to {}: this rank has only {} of {}; save a checkpoint and run `phalanx "
                      "checkpoint consolidate` on it",
                      safetensors::quote_name(named.name), path.string(), held_box(named).text(), describe_type(info)));
    const PlaceInFile place = placed(options.place_in_file, named.name);
    of_file[place.name].add(place, named.tensor);
  }
  std::vector<safetensors::TensorInfo> infos;
  for (const auto& [name, tensor] : of_file) infos.push_back(tensor.info(name, options.dtype));
  auto metadata = options.metadata;
  metadata.insert_or_assign("format", "pt");
  const auto header = safetensors::make_header(std::move(infos), std::move(metadata));

  auto temporary = path;
  temporary += ".tmp";
  try {
    BlockWriter writer(fs, temporary);
    writer.append_header(safetensors::format_header(header));
    for (const auto& info : header.tensors) {
      const auto tensor = of_file.at(info.name).whole(options.dtype);  // one that is put together alive at a time
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
