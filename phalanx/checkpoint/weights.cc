#include "phalanx/checkpoint/weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/name_patterns.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/files/block_writer.h"
#include "phalanx/checkpoint/files/element_values.h"
#include "phalanx/checkpoint/files/file_tensor_copy.h"
#include "phalanx/checkpoint/files/mismatch.h"
#include "phalanx/checkpoint/files/mxfp4.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/files/weight_files.h"
#include "phalanx/checkpoint/files/weight_index.h"
#include "phalanx/checkpoint/tensor_bytes.h"
#include "phalanx/models/config/parameter_kinds.h"

namespace phalanx {
namespace {

struct SourceTensor {
  const safetensors::File* file;
  const safetensors::TensorInfo* info;
  bool used = false;
};

FileTensorView placed(const KeyMapping& map, const std::string& name) { return map ? map(name) : FileTensorView(name); }

/// Removes `prefix` from the start of `name`.
/// REQUIRES: `name` begins with it, if it is not empty.
std::string without_prefix(const std::string& name, const std::string& prefix) {
  return !prefix.empty() && name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

/// Refuses "model." tensors of the step that were not asked for: they belong to another model.
void refuse_others(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                   const LoadWeightsOptions& options) {
  constexpr std::string_view kPrefix = "model.";
  std::set<std::string> wanted;
  for (const auto& named : tensors) wanted.insert(named.name);
  Mismatches mismatches;
  const SavedState saved(path);
  for (const auto& tensor : saved.tensors()) {
    if (!tensor.name.starts_with(kPrefix)) continue;
    const std::string name = tensor.name.substr(kPrefix.size());
    if (wanted.contains(name) || (options.ignore && options.ignore(name))) continue;
    if (options.elsewhere && options.elsewhere(name)) continue;
    mismatches.unexpected({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  mismatches.throw_if_any(fmt::format("the weights in {} do not fit this model", path.string()));
}

LoadedWeights load_from_checkpoint(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                                   const LoadWeightsOptions& options) {
  const CheckpointReader reader(path);
  refuse_others(path, tensors, options);
  LoadedWeights loaded;
  loaded.bytes = reader.read(with_prefix("model.", tensors), {.allow_unexpected = true, .convert_dtype = true}).taken;
  for (const auto& file : reader.manifest().files) loaded.files.push_back(path / file.name);
  return loaded;
}

/// Where a tensor of the model is read from, and where a second copy of its values may be.
struct Chosen {
  SourceTensor source;
  std::optional<SourceTensor> copy;
  FileTensorView::Form form;
  std::optional<SourceTensor> scales = std::nullopt;
  bool is_mxfp4 = false;
};

constexpr std::int64_t kScaledBlock = 128;  // rows and columns that have one scale

safetensors::TensorInfo scales_of(const std::string& name, const std::vector<std::int64_t>& shape) {
  safetensors::TensorInfo scales{.name = name, .dtype = safetensors::Dtype::f32, .shape = shape};
  for (std::int64_t& size : scales.shape) size = (size + kScaledBlock - 1) / kScaledBlock;
  return scales;
}

/// Multiplies this rank's part of a matrix by the scales of its blocks.
void multiply_by_scales(const NamedTensor& named, const SourceTensor& scales) {
  const Box box = held_box(named);
  if (box.empty()) return;
  const at::NoGradGuard no_grad;
  const std::span<const std::byte> bytes = scales.file->bytes(*scales.info);
  at::Tensor own = at::empty(scales.info->shape, at::TensorOptions(at::kFloat));
  std::memcpy(own.mutable_data_ptr(), bytes.data(), bytes.size());
  for (std::size_t d = 0; d < box.shape.size(); ++d) {
    const at::Tensor places = at::arange(box.offsets[d], box.offsets[d] + box.shape[d], at::TensorOptions(at::kLong));
    own = own.index_select(static_cast<std::int64_t>(d), places.floor_divide(kScaledBlock));
  }
  const at::Tensor tensor = named.tensor.detach();
  tensor.copy_(tensor.to(at::kFloat) * own.to(tensor.device()));
}

/// `values`: a box of the tensor, as in `source`.
void require_same(const SourceTensor& source, const SourceTensor& copy, const FileTensorView::Form& form,
                  const std::vector<std::int64_t>& shape, const Box& box, std::span<const std::byte> values) {
  const auto dtype = copy.info->dtype;
  std::vector<std::byte> others(static_cast<std::size_t>(box.numel()) * safetensors::element_size(dtype));
  copy_from_view(form, shape, copy.file->bytes(*copy.info), box, others, safetensors::element_size(dtype));
  bool same = dtype == source.info->dtype && std::ranges::equal(values, others);
  if (!same) {
    std::vector<double> a(static_cast<std::size_t>(box.numel())), b(a.size());
    decode_elements(source.info->dtype, values, a);
    decode_elements(dtype, others, b);
    same = a == b;
  }
  if (same) return;
  throw CheckpointError(fmt::format(
      "the model's {} and {} are one matrix (its embeddings are tied), but {} and {} hold different ones: if both are "
      "trained weights, say so with \"tie_word_embeddings\": false in config.json; else take the second one out of the "
      "file",
      safetensors::quote_name(source.info->name), safetensors::quote_name(copy.info->name), source.file->path(),
      copy.file->path()));
}

/// A tensor of a file to be written: one of the model's, or several that are parts of it.
class FileTensor {
 public:
  /// `keeps_type`: it is written in its own type.
  void add(const FileTensorView& place, const at::Tensor& tensor, bool keeps_type) {
    const auto [part, is_new] = parts_.emplace(std::pair(place.form.slice, place.form.part), Part{tensor, place.form});
    const bool fits =
        is_new && (parts_.size() == 1 || (form_.parts == place.form.parts && form_.slices == place.form.slices));
    if (!fits) {
      throw CheckpointError(
          fmt::format("two tensors are to be written under the name {}", safetensors::quote_name(place.name)));
    }
    form_ = place.form;
    keeps_type_ = keeps_type;
  }

  safetensors::TensorInfo info(const std::string& name, const std::optional<at::ScalarType>& dtype) const {
    const auto& [first, form] = parts_.begin()->second;
    std::int64_t there = 0;
    for (const auto& [number, part] : parts_) there += part.form.span;
    const std::int64_t expected = form_.parts * std::max<std::int64_t>(form_.slices, 1);
    if (there != expected) {
      throw CheckpointError(
          fmt::format("cannot write tensor {}: {} of the {} parts that it is put together from are "
                      "there",
                      safetensors::quote_name(name), there, expected));
    }
    const auto type = type_of(first, dtype);
    auto info = describe_tensor({name, first.detach().new_empty({1}, type)});
    info.shape = shape_in_file(form, first.sizes().vec());
    return info;
  }

  at::Tensor whole(const std::optional<at::ScalarType>& dtype) const {
    if (form_.slices == 0) return joined(0, dtype);
    std::vector<at::Tensor> slices;
    for (std::int64_t slice = 0; slice < form_.slices; ++slice) slices.push_back(joined(slice, dtype));
    return at::stack(slices);
  }

 private:
  /// The parts of one slice.
  at::Tensor joined(std::int64_t slice, const std::optional<at::ScalarType>& dtype) const {
    std::vector<at::Tensor> all;
    for (std::int64_t part = 0; part < form_.parts; ++part) {
      const auto found = parts_.find({slice, part});  // the last ones of a span are not listed
      if (found != parts_.end()) all.push_back(found->second.tensor.detach());
    }
    at::Tensor tensor = all.size() == 1 ? all[0] : form_.alternate ? at::stack(all, 1).flatten(0, 1) : at::cat(all);
    tensor = tensor.to(type_of(tensor, dtype));
    return form_.transposed ? tensor.t().contiguous() : tensor;
  }

  at::ScalarType type_of(const at::Tensor& tensor, const std::optional<at::ScalarType>& dtype) const {
    return dtype && tensor.is_floating_point() && !keeps_type_ ? *dtype : tensor.scalar_type();
  }

  struct Part {
    at::Tensor tensor;
    FileTensorView::Form form;
  };
  FileTensorView::Form form_;
  bool keeps_type_ = false;
  std::map<std::pair<std::int64_t, std::int64_t>, Part> parts_;  // by the numbers of slice and part
};

}  // namespace

std::string brief_names(const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, int>> kinds;
  for (const std::string& name : names) {
    const std::string kind = without_numbers(name);
    const auto found = std::ranges::find(kinds, kind, &std::pair<std::string, int>::first);
    if (found != kinds.end()) {
      ++found->second;
    } else {
      kinds.emplace_back(kind, 1);
    }
  }
  std::string text;
  for (const auto& [kind, count] : kinds) {
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", kind, count > 1 ? fmt::format(" ({})", count) : "");
  }
  return text;
}

LoadedWeights load_weights(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                           const LoadWeightsOptions& options) {
  if (std::error_code error; std::filesystem::is_regular_file(path / kManifestName, error))
    return load_from_checkpoint(path, tensors, options);

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
                                        (path / kWeightIndexName).string(), safetensors::quote_name(name),
                                        file.filename().string()));
  }

  const auto find = [&](const std::string& name) {
    const auto found = sources.find(name);
    return found != sources.end() ? found : sources.find(without_prefix(name, options.optional_prefix));
  };
  Mismatches mismatches;
  std::vector<Chosen> chosen;
  for (const auto& named : tensors) {
    auto wanted = describe_tensor(named);
    const FileTensorView place = placed(options.key_mapping, named.name);
    wanted.name = place.name;
    wanted.shape = shape_in_file(place.form, wanted.shape);
    const auto found = find(place.name);
    if (const auto blocks = find(place.name + kMxfp4Blocks);
        options.reads_mxfp4 && found == sources.end() && blocks != sources.end()) {
      const Mxfp4Shapes shapes = mxfp4_shapes(place.form, named.global_shape());
      if (shapes.blocks.empty()) {
        throw CheckpointError(
            fmt::format("{}: {} is in 4 bits (MXFP4), but {} is {}, no matrix with rows of whole blocks "
                        "of {}: expected 16 or 32 bits",
                        blocks->second.file->path(), safetensors::quote_name(place.name), named.name,
                        describe_type(describe_tensor(named)), kMxfp4Block));
      }
      chosen.push_back({blocks->second, std::nullopt, place.form});
      chosen.back().is_mxfp4 = true;
      const auto take = [&](const std::string& ending, const std::vector<std::int64_t>& shape) -> SourceTensor* {
        const safetensors::TensorInfo expected{
            .name = place.name + ending, .dtype = safetensors::Dtype::u8, .shape = shape};
        const auto one = find(expected.name);
        if (one == sources.end()) {
          mismatches.missing(expected);
          return nullptr;
        }
        const auto& there = *one->second.info;
        if (there.shape != shape || there.dtype != expected.dtype) mismatches.differs(expected, there);
        one->second.used = true;
        return &one->second;
      };
      take(kMxfp4Blocks, shapes.blocks);
      if (const SourceTensor* scales = take(kMxfp4Scales, shapes.scales)) chosen.back().scales = *scales;
      continue;
    }
    if (found == sources.end()) {
      mismatches.missing(wanted);
      continue;
    }
    const auto& there = *found->second.info;
    const bool same_kind =
        at::isFloatingType(scalar_type_of(there.dtype)) == at::isFloatingType(scalar_type_of(wanted.dtype));
    if (there.shape != wanted.shape || !same_kind) mismatches.differs(wanted, there);
    found->second.used = true;
    chosen.push_back({found->second, std::nullopt, place.form});
    if (options.scales_in_file && there.dtype == safetensors::Dtype::f8_e4m3) {
      if (place.form.transposed || place.form.parts > 1 || place.form.slices > 0) {
        throw CheckpointError(
            fmt::format("{} is in 8 bits with scales, and is put together from a part of it: expected 16 "
                        "or 32 bits",
                        safetensors::quote_name(place.name)));
      }
      const auto scales_wanted = scales_of(options.scales_in_file(place.name), wanted.shape);
      if (const auto scales = find(scales_wanted.name); scales == sources.end()) {
        mismatches.missing(scales_wanted);
      } else {
        const auto& info = *scales->second.info;
        if (info.shape != scales_wanted.shape || info.dtype != scales_wanted.dtype) {
          mismatches.differs(scales_wanted, info);
        }
        scales->second.used = true;
        chosen.back().scales = scales->second;
      }
    }
    const std::string other = options.copy_in_file ? options.copy_in_file(named.name) : std::string();
    const auto copy = other.empty() ? sources.end() : find(other);
    if (copy == sources.end()) continue;
    copy->second.used = true;  // it is compared with
    chosen.back().copy = copy->second;
    if (copy->second.info->shape != wanted.shape) mismatches.differs(wanted, *copy->second.info);
  }
  for (const auto& file : files) {
    for (const auto& info : file.tensors()) {
      const auto is_one = [&](const std::function<bool(const std::string&)>& known) {
        return known && (known(info.name) || known(options.optional_prefix + info.name));
      };
      if (sources.at(info.name).used || is_one(options.elsewhere)) continue;
      is_one(options.ignore) ? loaded.ignored.push_back(info.name) : mismatches.unexpected(info);
    }
  }
  mismatches.throw_if_any(fmt::format("the weights in {} do not fit this model", path.string()));

  const auto ask_for = [&](std::size_t i) {  // while the previous one is copied
    if (i == tensors.size()) return;
    const auto& [source, copy, form, scales, is_mxfp4] = chosen[i];
    const auto& info = *source.info;
    if (is_mxfp4 || form.transposed || form.parts > 1 || form.slices > 0) return;
    const auto ranges = flat_ranges(held_box(tensors[i]), info.shape);
    if (ranges.size() != 1) return;  // not whole rows: this rank must not read what is between them
    const auto size = safetensors::element_size(info.dtype);
    source.file->will_need(source.file->bytes(info).subspan(static_cast<std::size_t>(ranges[0].begin) * size,
                                                            static_cast<std::size_t>(ranges[0].length) * size));
  };
  ask_for(0);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    ask_for(i + 1);
    const auto& [source, copy, form, scales, is_mxfp4] = chosen[i];
    const auto& info = *source.info;
    const std::span<const std::byte> bytes = source.file->bytes(info);
    const auto shape = tensors[i].global_shape();
    if (is_mxfp4) {
      const std::span<const std::byte> exponents = scales->file->bytes(*scales->info);
      loaded.bytes += fill_tensor(tensors[i], safetensors::Dtype::f32,
                                  [&, &form = form](const Box& box, std::span<std::byte> target) {
                                    return decode_mxfp4(form, shape, bytes, exponents, box, target);
                                  });
      continue;
    }
    const auto fill = [&, &source = source, &copy = copy, &form = form](const Box& box, std::span<std::byte> target) {
      const auto taken = copy_from_view(form, shape, bytes, box, target, safetensors::element_size(info.dtype));
      if (copy) require_same(source, *copy, form, shape, box, target);
      return taken;
    };
    loaded.bytes += fill_tensor(tensors[i], info.dtype, fill);
    if (scales) multiply_by_scales(tensors[i], *scales);
  }
  return loaded;
}

namespace {

using FileTensors = std::map<std::string, FileTensor>;

/// By their names in the file; `where` is for messages.
FileTensors file_tensors(const std::vector<NamedTensor>& tensors, const ExportWeightsOptions& options,
                         const std::filesystem::path& where) {
  FileTensors of_file;
  for (const auto& named : tensors) {
    const auto info = describe_tensor(named);
    if (held_box(named).shape != info.shape)
      throw CheckpointError(fmt::format(
          "cannot write tensor {} to {}: this rank has only {} of {}; save a checkpoint and run `phalanx "
          "checkpoint consolidate` on it",
          safetensors::quote_name(named.name), where.string(), held_box(named).text(), describe_type(info)));
    const FileTensorView place = placed(options.key_mapping, named.name);
    of_file[place.name].add(place, named.tensor, models::is_expert_bias(named.name));
  }
  return of_file;
}

/// ENSURES: the file is complete and on disk under `path`; after an error nothing of it is left.
void write_weights(const std::filesystem::path& path, const FileTensors& of_file,
                   std::vector<safetensors::TensorInfo> infos, const ExportWeightsOptions& options, FileSystem& fs) {
  auto metadata = options.metadata;
  metadata.insert_or_assign("format", "pt");
  const auto header = safetensors::make_header(std::move(infos), std::move(metadata));
  BlockWriter writer(fs, path);
  writer.append_header(safetensors::format_header(header));
  for (const auto& info : header.tensors) {
    const auto tensor = of_file.at(info.name).whole(options.dtype);  // only one assembled tensor is alive at a time
    read_tensor_rows(tensor, 0, tensor.dim() == 0 ? 1 : tensor.size(0),
                     [&](std::span<const std::byte> bytes) { writer.append(bytes); });
  }
  writer.finish();
}

std::filesystem::path temporary_of(const std::filesystem::path& path) { return std::filesystem::path(path) += ".tmp"; }

void remove_quietly(FileSystem& fs, const std::filesystem::path& path) {
  try {
    fs.remove_all(path);
  } catch (const std::exception&) {  // the first error is the one to report
  }
}

/// Whether a file holds weights under a name that this program or transformers gives them.
bool is_exported_weights(const std::string& name) {
  return name == kSingleWeightsName || (name.starts_with("model-") && name.ends_with(".safetensors"));
}

}  // namespace

void export_weights(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                    const ExportWeightsOptions& options, FileSystem& fs) {
  const FileTensors of_file = file_tensors(tensors, options, path);
  std::vector<safetensors::TensorInfo> infos;
  for (const auto& [name, tensor] : of_file) infos.push_back(tensor.info(name, options.dtype));
  try {
    write_weights(temporary_of(path), of_file, std::move(infos), options, fs);
    fs.rename(temporary_of(path), path);
  } catch (const Error&) {
    remove_quietly(fs, temporary_of(path));
    throw;
  }
  fs.sync_directory(path.parent_path().empty() ? std::filesystem::path(".") : path.parent_path());
}

std::vector<std::filesystem::path> export_weights_to_folder(const std::filesystem::path& folder,
                                                            const std::vector<NamedTensor>& tensors,
                                                            const ExportWeightsOptions& options, FileSystem& fs) {
  const FileTensors of_file = file_tensors(tensors, options, folder);
  std::vector<std::vector<safetensors::TensorInfo>> files(1);
  std::uint64_t total = 0, bytes = 0;
  for (const auto& [name, tensor] : of_file) {
    auto info = tensor.info(name, options.dtype);
    const std::uint64_t size = *safetensors::byte_size(info.dtype, info.shape);
    if (options.max_file_bytes > 0 && !files.back().empty() && bytes + size > options.max_file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += size, total += size;
    files.back().push_back(std::move(info));
  }
  std::vector<std::filesystem::path> paths;
  nlohmann::ordered_json index{{"metadata", {{"total_size", total}}}, {"weight_map", nlohmann::ordered_json::object()}};
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string name = files.size() == 1 ? std::string(kSingleWeightsName)
                                               : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    paths.push_back(folder / name);
    for (const auto& info : files[i]) index["weight_map"][info.name] = name;
  }
  fs.make_directory(folder);
  try {
    for (std::size_t i = 0; i < files.size(); ++i)
      write_weights(temporary_of(paths[i]), of_file, std::move(files[i]), options, fs);
    // The old index first: it must never name new files. Without an index, parts of two exports do not pass for a
    // model.
    fs.remove_all(folder / kWeightIndexName);
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      if (is_exported_weights(entry.path().filename().string())) fs.remove_all(entry.path());
    }
    for (const auto& path : paths) fs.rename(temporary_of(path), path);
    if (paths.size() > 1) {
      auto file = fs.create(folder / kWeightIndexName);
      file->write(index.dump(2) + "\n");
      file->sync();
      file->close();
      paths.push_back(folder / kWeightIndexName);
    }
  } catch (const Error&) {
    for (const auto& path : paths) remove_quietly(fs, temporary_of(path));
    throw;
  }
  fs.sync_directory(folder);
  return paths;
}

}  // namespace phalanx
