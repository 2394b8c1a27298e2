// The hash that guards a checkpoint file: XXH3 (64 bits) of each 1 MiB block, the last one shorter.
//
// Per block rather than per file or per tensor, so that whoever reads a part of a file verifies exactly the blocks it
// touches, headers included. It detects damage (a flipped bit, a torn write), not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace phalanx {

inline constexpr std::uint64_t kHashBlockBytes = 1 << 20;

std::uint64_t hash_block(std::span<const std::byte> bytes);
/// Block `block` of the file's bytes, which must have so many.
std::span<const std::byte> bytes_of_block(std::span<const std::byte> file, std::uint64_t block);
/// 16 hexadecimal digits.
std::string format_hash(std::uint64_t hash);
/// That of a short text, as one block.
std::string hash_of_text(std::string_view text);

}  // namespace phalanx
