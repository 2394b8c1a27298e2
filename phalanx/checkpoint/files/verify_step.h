// Checks every byte of a checkpoint against its manifest. It continues after the first damage, to list all that is
// lost.
//
//   for (const auto& damage : verify_step(folder, [&](std::uint64_t bytes) { bar.advance(bytes); }))
//     print(damage.file, damage.reason);
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace phalanx {

struct Damage {
  std::string file;    // its name in the folder; "": the whole checkpoint
  std::string reason;  // "bytes 0 to 1048576 do not match their hash; they hold tensor "model.norm.weight""
};

/// The bytes of all files that the manifest names. Throws DamagedError if the manifest itself is missing or damaged.
std::uint64_t bytes_to_verify(const std::filesystem::path& folder);

/// Returns an empty list if every block of every file has its hash and the boxes of every tensor make it complete.
/// Throws the same DamagedError. `progress` gets the number of bytes just verified.
std::vector<Damage> verify_step(
    const std::filesystem::path& folder, const std::function<void(std::uint64_t)>& progress = [](std::uint64_t) {});

}  // namespace phalanx
