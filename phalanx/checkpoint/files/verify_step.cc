#include "phalanx/checkpoint/files/verify_step.h"

#include <fmt/format.h>

#include "phalanx/base/file.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/checkpoint/files/saved_state.h"

namespace phalanx {
namespace {

void verify_file(const std::filesystem::path& folder, const ManifestFile& entry,
                 const std::function<void(std::uint64_t)>& progress, std::vector<Damage>& found) {
  const auto path = folder / entry.name;
  MappedFile file;
  try {
    file = MappedFile(path, MappedFile::Access::sequential);
  } catch (const Error& error) {
    found.push_back({entry.name, error.what()});
    return progress(entry.size);
  }
  if (file.size() != entry.size) {
    found.push_back({entry.name, fmt::format("has {} bytes; the manifest says {}", file.size(), entry.size)});
    return progress(entry.size);
  }
  for (std::size_t block = 0; block < entry.block_hashes.size(); ++block) {
    const auto bytes = bytes_of_block(file.bytes(), block);
    if (hash_block(bytes) != entry.block_hashes[block])
      found.push_back({entry.name, describe_damage(entry, file.bytes(), block)});
    progress(bytes.size());
  }
}

Manifest manifest_of(const std::filesystem::path& folder) {
  const auto path = folder / kManifestName;
  try {
    return parse_manifest(path.string(), read_file(path));
  } catch (const Error& error) {
    throw DamagedError(error.what());
  }
}

}  // namespace

std::uint64_t bytes_to_verify(const std::filesystem::path& folder) {
  std::uint64_t bytes = 0;
  for (const auto& entry : manifest_of(folder).files) bytes += entry.size;
  return bytes;
}

std::vector<Damage> verify_step(const std::filesystem::path& folder,
                                const std::function<void(std::uint64_t)>& progress) {
  std::vector<Damage> found;
  const auto manifest = manifest_of(folder);
  for (const auto& entry : manifest.files) verify_file(folder, entry, progress, found);
  const auto name = (folder.has_filename() ? folder : folder.parent_path()).filename().string();
  const auto expected = fmt::format("step-{}", manifest.step);
  if (name.starts_with("step-") && name != expected && name != expected + ".replaced")
    found.push_back({"", fmt::format("{}: its manifest is of step {}: no run takes it under this name", folder.string(),
                                     manifest.step)});
  if (!found.empty()) return found;
  // Every byte is as it was written. Now: was it written by one save, with every tensor complete?
  try {
    const SavedState saved(folder, manifest);
    for (const auto& tensor : saved.tensors()) {
      try {
        saved.check_complete(tensor);
      } catch (const DamagedError& error) {
        found.push_back({"", error.what()});
      }
    }
  } catch (const CheckpointError& error) {
    found.push_back({"", error.what()});
  }
  return found;
}

}  // namespace phalanx
