// Sizes and lists as people write them, on command lines.
//
//   parse_size("--max-file-size", "4GiB");   // 4294967296
//   split_list("4K,64K,1M");                 // {"4K", "64K", "1M"}
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phalanx {

/// Bytes: 4096, 4K, 4KiB, 1M, 2G, 1T; binary units, up to 1 TiB. A UsageError that begins with `flag` for anything
/// else.
std::int64_t parse_size(const std::string& flag, const std::string& text);
/// What stands between commas; empty parts too.
std::vector<std::string> split_list(const std::string& list);

}  // namespace phalanx
