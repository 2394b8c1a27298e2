#include "phalanx/checkpoint/files/rewrite.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/files/block_writer.h"
#include "phalanx/checkpoint/files/box_copy.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/files/element_values.h"
#include "phalanx/checkpoint/files/file_tensor_copy.h"
#include "phalanx/checkpoint/files/shard_plan.h"
#include "phalanx/checkpoint/files/weight_index.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/models/config/parameter_kinds.h"

namespace phalanx {
namespace {

using safetensors::Dtype;
using safetensors::TensorInfo;

constexpr std::int64_t kElementsCopiedAtOnce = 1 << 20;
constexpr std::string_view kModelPrefix = "model.";

struct Part {
  const SavedTensor* tensor;
  FileTensorView::Form form;
};

/// A box of a saved tensor that is written to a file, under a name and a dtype that may differ. Or a tensor of the file
/// that several saved tensors are parts of, in the file's form.
struct Output {
  std::vector<Part> parts;
  TensorInfo info;
  Box box;
};

class FileRewriter {
 public:
  FileRewriter(SavedState& saved, FileSystem& fs, const std::function<void(std::uint64_t)>& progress)
      : saved_(saved), fs_(fs), progress_(progress) {}

  ManifestFile write(const std::filesystem::path& path, const std::vector<Output>& outputs,
                     std::map<std::string, std::string> metadata) {
    std::vector<TensorInfo> infos;
    std::unordered_map<std::string, const Output*> by_name;
    for (const auto& output : outputs) {
      infos.push_back(output.info);
      by_name[output.info.name] = &output;
    }
    const auto header = safetensors::make_header(std::move(infos), std::move(metadata));
    BlockWriter writer(fs_, path);
    writer.append_header(safetensors::format_header(header));
    for (const auto& info : header.tensors) {
      const auto& output = *by_name.at(info.name);
      for_each_chunk(output.box, kElementsCopiedAtOnce, [&](const Box& piece) {
        const auto bytes = read(output.parts, piece, info.dtype);
        writer.append(bytes);
        progress_(bytes.size());
      });
    }
    return writer.finish();
  }

 private:
  std::span<const std::byte> read(const std::vector<Part>& parts, const Box& piece, Dtype dtype) {
    const auto elements = static_cast<std::size_t>(piece.numel());
    const Dtype saved = parts.front().tensor->dtype;
    const std::size_t size = safetensors::element_size(saved);
    bytes_.resize(elements * size);
    for (const auto& [tensor, form] : parts) {
      if (form == FileTensorView::Form()) {
        saved_.read(*tensor, piece, bytes_);
        continue;
      }
      const Box box = box_from_file(form, tensor->shape, piece);
      if (box.empty()) continue;
      of_part_.resize(static_cast<std::size_t>(box.numel()) * size);
      saved_.read(*tensor, box, of_part_);
      copy_to_view(form, tensor->shape, box, of_part_, piece, bytes_, size);
    }
    if (dtype == saved) return bytes_;
    values_.resize(elements);
    decode_elements(saved, bytes_, values_);
    bytes_.resize(elements * safetensors::element_size(dtype));
    encode_elements(dtype, values_, bytes_);
    return bytes_;
  }

  SavedState& saved_;
  FileSystem& fs_;
  const std::function<void(std::uint64_t)>& progress_;
  std::vector<std::byte> bytes_, of_part_;
  std::vector<double> values_;
};

TensorInfo info_of(std::string name, Dtype dtype, const std::vector<std::int64_t>& shape) {
  TensorInfo info{.name = std::move(name), .dtype = dtype, .shape = shape};
  info.end = *safetensors::byte_size(dtype, shape);  // its size; make_header() places it
  return info;
}

std::vector<Output> choose(const SavedState& saved, const ConsolidateOptions& options) {
  std::vector<Output> outputs;
  std::unordered_map<std::string, std::size_t> of_name;
  for (const auto& tensor : saved.tensors()) {
    std::string name = tensor.name;
    if (!options.all) {
      if (!name.starts_with(kModelPrefix)) continue;
      name.erase(0, kModelPrefix.size());
    }
    const FileTensorView place = options.key_mapping ? options.key_mapping(name) : FileTensorView(name);
    // What experts are chosen by is added to scores in float32.
    const bool keeps = models::is_expert_bias(tensor.name);
    const bool converts = options.dtype && is_floating_point(tensor.dtype) && !keeps;
    const auto [found, is_new] = of_name.emplace(place.name, outputs.size());
    if (is_new) {
      const auto shape = shape_in_file(place.form, tensor.shape);
      outputs.push_back({{},
                         info_of(place.name, converts ? *options.dtype : tensor.dtype, shape),
                         {std::vector<std::int64_t>(shape.size(), 0), shape}});
    }
    outputs[found->second].parts.push_back({&tensor, place.form});
  }
  if (outputs.empty())
    throw CheckpointError(fmt::format("{} holds no {}", saved.folder().string(),
                                      options.all ? "tensors" : "model weights (tensors \"model.*\")"));
  for (const auto& output : outputs) {
    for (const auto& part : output.parts) {
      saved.check_complete(*part.tensor);
      if (part.tensor->dtype == output.parts.front().tensor->dtype) continue;
      throw CheckpointError(fmt::format("{}: {} and {} are parts of one tensor, but are {} and {}",
                                        saved.folder().string(), output.parts.front().tensor->name, part.tensor->name,
                                        safetensors::name_of(output.parts.front().tensor->dtype),
                                        safetensors::name_of(part.tensor->dtype)));
    }
  }
  return outputs;
}

/// In the order of their names. A new file begins when the next tensor would make the last one too large.
std::vector<std::vector<Output>> split(std::vector<Output> outputs, std::uint64_t max_bytes) {
  std::vector<std::vector<Output>> files(1);
  std::uint64_t bytes = 0;
  for (auto& output : outputs) {
    if (max_bytes > 0 && !files.back().empty() && bytes + output.info.size() > max_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += output.info.size();
    files.back().push_back(std::move(output));
  }
  return files;
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.parent_path().empty() ? std::filesystem::path(".") : path.parent_path();
}

/// Runs `write`, which fills `temporary`, and moves it to `out`. After a failure nothing of it is left.
void put_in_place(FileSystem& fs, const std::filesystem::path& temporary, const std::filesystem::path& out,
                  const std::function<void()>& write) {
  try {
    fs.remove_all(temporary);
    write();
    fs.rename(temporary, out);
  } catch (const Error&) {
    try {
      fs.remove_all(temporary);
    } catch (const std::exception&) {  // the first error is the one to report
    }
    throw;
  }
  fs.sync_directory(folder_of(out));
}

void write_text(FileSystem& fs, const std::filesystem::path& path, const std::string& text) {
  auto file = fs.create(path);
  file->write(text);
  file->sync();
  file->close();
}

std::filesystem::path without_trailing_slash(const std::filesystem::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

}  // namespace

std::uint64_t consolidated_bytes(const SavedState& saved, const ConsolidateOptions& options) {
  std::uint64_t bytes = 0;
  for (const auto& output : choose(saved, options)) bytes += output.info.size();
  return bytes;
}

WrittenFiles consolidate(SavedState& saved, const std::filesystem::path& path, const ConsolidateOptions& options,
                         FileSystem& fs) {
  const auto out = without_trailing_slash(path);
  const bool is_file = out.extension() == ".safetensors";
  if (is_file && options.max_file_bytes > 0)
    throw CheckpointError(fmt::format("{} is one file: to write several, name a directory for them", out.string()));
  if (is_file && !options.beside.empty())
    throw CheckpointError(fmt::format("{} is one file, but {} is to stand beside it: name a directory for them",
                                      out.string(), options.beside.begin()->first));
  if (options.dtype && !can_encode(*options.dtype))
    throw CheckpointError(
        fmt::format("cannot convert to {}: expected F64, F32, F16 or BF16", safetensors::name_of(*options.dtype)));
  std::error_code error;
  const bool is_empty_directory =
      !is_file && std::filesystem::is_directory(out, error) && std::filesystem::is_empty(out, error);
  if (std::filesystem::exists(out, error) && !is_empty_directory)
    throw CheckpointError(fmt::format("{} exists already: remove it, or choose another name", out.string()));

  WrittenFiles written;
  auto outputs = choose(saved, options);
  written.tensors = outputs.size();
  for (const auto& output : outputs) written.bytes += output.info.size();
  const auto temporary = std::filesystem::path(out) += ".tmp";
  fs.make_directory(folder_of(out));
  FileRewriter rewriter(saved, fs, options.progress);
  std::map<std::string, std::string> header = {{"format", "pt"}};
  // If the saving program did not describe its model, nothing is written about it.
  if (const std::string told = metadata_for_weights(saved.manifest().metadata); told != "{}") {
    header.emplace(kMetadataInHeader, told);
  }
  put_in_place(fs, temporary, out, [&] {
    if (is_file) {
      rewriter.write(temporary, outputs, header);
      written.files.push_back(out);
      return;
    }
    fs.make_directory(temporary);
    const auto files = split(std::move(outputs), options.max_file_bytes);
    nlohmann::ordered_json index{{"metadata", {{"total_size", written.bytes}}},
                                 {"weight_map", nlohmann::ordered_json::object()}};
    for (std::size_t i = 0; i < files.size(); ++i) {
      const auto name = options.max_file_bytes == 0
                            ? std::string("model.safetensors")
                            : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
      rewriter.write(temporary / name, files[i], header);
      for (const auto& output : files[i]) index["weight_map"][output.info.name] = name;
      written.files.push_back(out / name);
    }
    if (options.max_file_bytes > 0) {
      write_text(fs, temporary / kWeightIndexName, index.dump(2) + "\n");
      written.files.push_back(out / kWeightIndexName);
    }
    for (const auto& [name, text] : options.beside) {
      write_text(fs, temporary / name, text);
      written.files.push_back(out / name);
    }
    fs.sync_directory(temporary);
    if (is_empty_directory) fs.remove(out);
  });
  return written;
}

WrittenFiles reshard(SavedState& saved, const std::filesystem::path& folder, const ReshardOptions& options,
                     FileSystem& fs) {
  if (options.files < 1) throw ConfigError(fmt::format("reshard into {} files: expected 1 or more", options.files));
  const auto out = step_directory(without_trailing_slash(folder), saved.manifest().step);
  std::error_code error;
  if (std::filesystem::exists(out, error))
    throw CheckpointError(fmt::format("{} exists already: remove it, or choose another folder", out.string()));

  std::vector<TensorInfo> infos;
  for (const auto& tensor : saved.tensors()) {
    saved.check_complete(tensor);
    infos.push_back(info_of(tensor.name, tensor.dtype, tensor.shape));
  }
  WrittenFiles written;
  written.tensors = infos.size();
  auto manifest = saved.manifest();
  manifest.files.clear();
  const auto temporary = std::filesystem::path(out) += ".tmp";
  fs.make_directory(folder_of(out));
  FileRewriter rewriter(saved, fs, options.progress);
  put_in_place(fs, temporary, out, [&] {
    fs.make_directory(temporary);
    for (int rank = 0; rank < options.files; ++rank) {
      std::vector<Output> outputs;
      SavedOffsets offsets;
      for (const auto& part : plan_shard(infos, rank, options.files)) {
        const auto& tensor = saved.tensors()[part.tensor];
        const Box box = rows_of_box(tensor.whole(), part.row_begin, part.row_end);
        offsets[tensor.name] = box.offsets;
        outputs.push_back({{{&tensor, {}}}, info_of(tensor.name, tensor.dtype, box.shape), box});
      }
      manifest.files.push_back(rewriter.write(temporary / shard_file_name(rank), outputs, sharding_metadata(offsets)));
      written.files.push_back(out / shard_file_name(rank));
      written.bytes += manifest.files.back().size;
    }
    write_text(fs, temporary / kManifestName, format_manifest(manifest));
    fs.sync_directory(temporary);
  });
  return written;
}

}  // namespace phalanx
