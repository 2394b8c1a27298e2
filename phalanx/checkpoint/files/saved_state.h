// SavedState opens a step directory for reading: which global tensors it holds, and where their boxes are in its files.
// It uses no torch tensor, no mesh and no communicator: a tool can read what any run has saved.
//
// A tensor may be spread over any number of boxes in any files. Its global shape is the extent of these boxes. Opening
// verifies the headers of all files. read() verifies the blocks that it touches, and no others (verified_file.h).
// An error in the files is a DamagedError that names file and tensor. Not thread-safe.
//
//   SavedState saved("run/checkpoint/step-100");
//   for (const auto& tensor : saved.tensors()) print(tensor.name, tensor.shape, tensor.boxes.size());
//   saved.read(*saved.find("model.norm.weight"), {{128}, {64}}, buffer);     // elements 128 to 192
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/verified_file.h"
#include "phalanx/layout/box.h"

namespace phalanx {

struct SavedBox {
  std::size_t file = 0;  // index in files()
  const safetensors::TensorInfo* info = nullptr;
  Box box;  // in the global tensor
};

struct SavedTensor {
  std::string name;
  safetensors::Dtype dtype = safetensors::Dtype::f32;
  std::vector<std::int64_t> shape;
  std::vector<SavedBox> boxes;  // by their offsets

  Box whole() const { return {std::vector<std::int64_t>(shape.size(), 0), shape}; }
  std::uint64_t bytes() const { return static_cast<std::uint64_t>(whole().numel()) * safetensors::element_size(dtype); }
};

/// Reads the manifest of a step directory and checks the files. Throws DamagedError if there is no manifest, if it is
/// damaged, or if a file that it names is missing or has another size.
Manifest read_step_manifest(const std::filesystem::path& folder);

class SavedState {
 public:
  explicit SavedState(std::filesystem::path folder);
  SavedState(std::filesystem::path folder, Manifest manifest);  // a manifest from read_step_manifest()
  SavedState(SavedState&&) = default;

  const std::filesystem::path& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  const std::vector<VerifiedFile>& files() const { return files_; }
  const std::vector<SavedTensor>& tensors() const { return tensors_; }  // by name
  const SavedTensor* find(const std::string& name) const;               // nullptr if there is none

  /// Throws DamagedError unless the tensor's boxes hold each of its elements exactly once.
  void check_complete(const SavedTensor& tensor) const;
  /// Copies the tensor's elements in `wanted` to `target`, row-major in the shape of `wanted`. Returns their bytes.
  std::uint64_t read(const SavedTensor& tensor, const Box& wanted, std::span<std::byte> target);
  /// Bytes of all blocks that have been read from disk and checked so far, including headers.
  std::uint64_t verified_bytes() const;

 private:
  void collect();

  std::filesystem::path folder_;
  Manifest manifest_;
  std::vector<VerifiedFile> files_;
  std::vector<SavedTensor> tensors_;
  std::unordered_map<std::string, std::size_t> index_;
};

}  // namespace phalanx
