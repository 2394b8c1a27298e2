#include "phalanx/checkpoint/block_hash.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL  // the header alone: nothing to link, nothing to ship
#include <xxhash.h>

namespace phalanx {

std::uint64_t hash_block(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string format_hash(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

}  // namespace phalanx
