// The hash that protects a checkpoint file: XXH3 (64 bits) of each 1 MiB block; the last block may be shorter.
//
// There is one hash per block, not per file or per tensor. So a reader of a part of a file verifies exactly the blocks
// it touches, headers included. The hash detects damage (a flipped bit, a torn write), not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace phalanx {

inline constexpr std::uint64_t kHashBlockBytes = 1 << 20;

std::uint64_t hash_block(std::span<const std::byte> bytes);
/// The bytes of block `block` of the file.
/// REQUIRES: the file has that block.
std::span<const std::byte> bytes_of_block(std::span<const std::byte> file, std::uint64_t block);
/// Formats a hash as 16 hexadecimal digits.
std::string format_hash(std::uint64_t hash);
/// The hash of a short text, as one block.
std::string hash_of_text(std::string_view text);

}  // namespace phalanx
