// manifest.json lists the contents of a checkpoint. It is written last, so a directory that has one is complete.
//
//   {"checksum": "xxh3:9a0f...",           <- of every byte after this line
//    "format": "phalanx-checkpoint", "version": 1, "step": 100,
//    "integers": {"data.position": 800, "step": 100},
//    "metadata": {"model": {...}},         <- any JSON object of the saver
//    "block_bytes": 1048576,
//    "files": [{"name": "shard-...safetensors", "size": 123, "header_xxh3": "...", "xxh3": ["...", ...]}]}
//
// It does not use torch. Names, shapes and boxes are in the files' own headers, which the block hashes cover. A header
// also has its own hash. So if a block of the header is damaged, it is known whether the names in the header can still
// be used.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

inline constexpr const char* kManifestName = "manifest.json";

struct ManifestFile {
  std::string name;  // within the checkpoint's directory
  std::uint64_t size = 0;
  std::vector<std::uint64_t> block_hashes;
  std::optional<std::uint64_t> header_hash = {};  // of the safetensors header with its length; unset in older manifests
};

struct Manifest {
  std::int64_t step = 0;
  std::map<std::string, std::int64_t> integers;
  std::string metadata = "{}";  // a JSON object
  std::vector<ManifestFile> files;
};

/// Throws CheckpointError if metadata is not a JSON object.
std::string format_manifest(const Manifest& manifest);
/// `file` is for messages. Throws CheckpointError if it is damaged, malformed, or of a format this program does not
/// read.
Manifest parse_manifest(const std::string& file, std::string_view text);

/// One file's entry, in the form in which ranks exchange what they wrote.
std::string format_manifest_file(const ManifestFile& file);
ManifestFile parse_manifest_file(const std::string& text);

}  // namespace phalanx
