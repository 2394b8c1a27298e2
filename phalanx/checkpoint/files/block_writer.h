// BlockWriter writes a file from front to back in blocks of 1 MiB. It hashes each block while it is in the CPU cache.
//
//   BlockWriter writer(fs, folder / "a.safetensors");
//   writer.append_header(safetensors::format_header(header));
//   writer.append(tensor_bytes);
//   const ManifestFile entry = writer.finish();   // on the disk: written, synced, closed
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/manifest.h"

namespace phalanx {

class BlockWriter {
 public:
  BlockWriter(FileSystem& fs, const std::filesystem::path& path);

  /// Appends the safetensors header, which also gets its own hash.
  /// REQUIRES: it is the first call, if it is called.
  void append_header(std::string_view header);
  void append(std::span<const std::byte> bytes);
  ManifestFile finish();

 private:
  void write_block(std::span<const std::byte> block);

  std::unique_ptr<WritableFile> file_;
  ManifestFile entry_;
  std::vector<std::byte> pending_;  // less than a block
};

}  // namespace phalanx
