// Checks every byte of a checkpoint against its manifest, and goes on after the first damage: what is lost, all of it.
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
  std::string file;    // its name in the folder; of the whole checkpoint: ""
  std::string reason;  // "bytes 0 to 1048576 do not match their hash; they hold tensor "model.norm.weight""
};

/// Bytes of all files that the manifest names. A DamagedError if the manifest itself is missing or damaged.
std::uint64_t bytes_to_verify(const std::filesystem::path& folder);

/// Empty if every block of every file has its hash and the boxes of every tensor make a whole one. The same
/// DamagedError. `progress` is told of bytes as they are done.
std::vector<Damage> verify_step(
    const std::filesystem::path& folder, const std::function<void(std::uint64_t)>& progress = [](std::uint64_t) {});

}  // namespace phalanx
