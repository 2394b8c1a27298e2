// Small step directories written without torch and without a communicator, for tests.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/block_writer.h"
#include "phalanx/checkpoint/files/box_copy.h"
#include "phalanx/checkpoint/files/element_values.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/files/shard_plan.h"

namespace phalanx::checkpoint_testing {

struct SmallTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<double> values;
  safetensors::Dtype dtype = safetensors::Dtype::f32;
};

/// Values first, first + 1, ... of this shape.
inline SmallTensor counting(std::string name, std::vector<std::int64_t> shape, double first,
                            safetensors::Dtype dtype = safetensors::Dtype::f32) {
  SmallTensor tensor{std::move(name), shape, {}, dtype};
  const std::int64_t count = Box{shape, shape}.numel();
  for (std::int64_t i = 0; i < count; ++i) tensor.values.push_back(first + static_cast<double>(i));
  return tensor;
}

/// The state of `number` that the tests of tools use.
inline std::vector<SmallTensor> small_state(double number) {
  return {counting("model.embedding.weight", {6, 4}, number),
          counting("model.norm.weight", {4}, number, safetensors::Dtype::bf16),
          counting("optimizer.embedding.weight.exp_avg", {6, 4}, number + 100)};
}

/// Writes folder/step-N as `files` ranks with replicated state do.
inline std::filesystem::path write_small_step(const std::filesystem::path& folder, std::int64_t step,
                                              const std::vector<SmallTensor>& tensors, int files = 1,
                                              const std::string& metadata = R"({"model":{"dim":4}})") {
  const auto path = folder / ("step-" + std::to_string(step));
  std::filesystem::create_directories(path);
  std::vector<safetensors::TensorInfo> infos;
  for (const auto& tensor : tensors)
    infos.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  Manifest manifest{.step = step, .integers = {{"seed", 7}, {"step", step}}, .metadata = metadata};
  for (int rank = 0; rank < files; ++rank) {
    std::vector<safetensors::TensorInfo> parts;
    std::vector<std::byte> bytes;
    SavedOffsets offsets;
    for (const auto& part : plan_shard(infos, rank, files)) {
      auto info = infos[part.tensor];
      const Box whole{std::vector<std::int64_t>(info.shape.size(), 0), info.shape};
      const Box box = rows_of_box(whole, part.row_begin, part.row_end);
      info.shape = box.shape;
      offsets[info.name] = box.offsets;
      parts.push_back(info);
    }
    const auto header = safetensors::make_header(parts, sharding_metadata(offsets));
    BlockWriter writer(posix_file_system(), path / shard_file_name(rank));
    writer.append_header(safetensors::format_header(header));
    for (const auto& info : header.tensors) {
      for (const auto& tensor : tensors) {
        if (tensor.name != info.name || info.size() == 0) continue;
        const auto first =
            info.shape.empty() ? 0 : offsets[info.name][0] * (Box{info.shape, info.shape}.numel() / info.shape[0]);
        bytes.resize(info.size());
        encode_elements(
            info.dtype,
            std::span(tensor.values)
                .subspan(static_cast<std::size_t>(first), info.size() / safetensors::element_size(info.dtype)),
            bytes);
        writer.append(bytes);
      }
    }
    manifest.files.push_back(writer.finish());
  }
  write_file(path / kManifestName, format_manifest(manifest));
  return path;
}

inline void flip_bit(const std::filesystem::path& path, std::size_t at) {
  auto bytes = read_file(path);
  bytes.at(at) = static_cast<char>(bytes[at] ^ 1);
  write_file(path, bytes);
}

}  // namespace phalanx::checkpoint_testing
