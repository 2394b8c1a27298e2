#include "phalanx/checkpoint/files/block_hash.h"

#include <fmt/format.h>

#include <algorithm>

#define XXH_INLINE_ALL  // header only: nothing to link, nothing to ship
#include <xxhash.h>

namespace phalanx {

std::uint64_t hash_block(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::span<const std::byte> bytes_of_block(std::span<const std::byte> file, std::uint64_t block) {
  const auto begin = block * kHashBlockBytes;
  return file.subspan(begin, std::min(kHashBlockBytes, file.size() - begin));
}

std::string format_hash(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

std::string hash_of_text(std::string_view text) { return format_hash(hash_block(std::as_bytes(std::span(text)))); }

}  // namespace phalanx
