// VerifiedFile reads a safetensors file of a checkpoint and checks every block it touches against the manifest's
// hashes.
//
// Opening checks the size and verifies the blocks of the header before any byte of the header is interpreted. bytes()
// verifies the blocks of what it returns, each block once. Damage is a DamagedError that names file, block and tensors.
// If the header itself is damaged, the error says only that, because the names in it cannot be trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/layout/box.h"

namespace phalanx {

/// The files themselves are damaged, so that an older checkpoint may be used instead. An intact checkpoint of another
/// model is a different error.
class DamagedError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

class VerifiedFile {
 public:
  VerifiedFile(const std::filesystem::path& folder, ManifestFile entry);

  const std::string& path() const { return path_; }
  const ManifestFile& entry() const { return entry_; }
  const safetensors::Header& header() const { return header_; }
  std::span<const std::byte> bytes(const safetensors::TensorInfo& info);
  /// All bytes of the tensor, of which only those of `part` (a box in the tensor as stored in this file) are verified.
  std::span<const std::byte> bytes_around(const safetensors::TensorInfo& info, const Box& part);
  /// Asks the system to read that part, if it is whole rows, without waiting: bytes_around() will find it in memory.
  void will_need(const safetensors::TensorInfo& info, const Box& part) const;
  std::uint64_t verified_bytes() const { return verified_bytes_; }

 private:
  void verify(std::uint64_t begin, std::uint64_t end);

  ManifestFile entry_;
  std::string path_;
  MappedFile mapped_;
  std::vector<bool> verified_;  // by block
  std::uint64_t verified_bytes_ = 0;
  safetensors::Header header_;
};

/// Describes block `block` of a file, whose bytes do not match its hash: "bytes 0 to 4096 do not match their
/// hash; they hold tensor "a" and tensor "b"", "... and 7 more", or "...; the header is damaged, ...".
std::string describe_damage(const ManifestFile& entry, std::span<const std::byte> file, std::uint64_t block);

}  // namespace phalanx
