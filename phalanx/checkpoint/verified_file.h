// A safetensors file of a checkpoint, read with every touched block checked against the manifest's hashes.
//
// Opening checks the size and verifies the blocks of the header before a byte of it is interpreted; bytes() verifies
// the blocks of what it returns, each block once. Damage is a DamagedError that names file, tensor and block.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/checkpoint/manifest.h"
#include "phalanx/checkpoint/safetensors.h"

namespace phalanx {

/// Something is wrong with the files themselves, so that an older checkpoint may serve; as opposed to a sound
/// checkpoint of another model.
class DamagedError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

class VerifiedFile {
 public:
  VerifiedFile(const std::filesystem::path& folder, ManifestFile entry);

  const std::string& path() const { return path_; }
  const safetensors::Header& header() const { return header_; }
  std::span<const std::byte> bytes(const safetensors::TensorInfo& info);

 private:
  void verify(std::uint64_t begin, std::uint64_t end, const std::string& what);

  ManifestFile entry_;
  std::string path_;
  MappedFile mapped_;
  std::vector<bool> verified_;  // by block
  safetensors::Header header_;
};

}  // namespace phalanx
