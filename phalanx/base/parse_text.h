// Numbers, sizes and lists as people write them, on command lines.
//
//   parse_whole<std::int64_t>("12");         // 12; nothing for "12 " or "twelve"
//   parse_size("--max-file-size", "4GiB");   // 4294967296
//   lower_case("A.JSONL");                   // "a.jsonl"
//   split_list("4K,64K,1M");                 // {"4K", "64K", "1M"}
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace phalanx {

/// The number that the text is, from its first character to its last; nothing for any other text.
template <class T>
std::optional<T> parse_whole(std::string_view text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || rest != end) return std::nullopt;
  return value;
}

/// ASCII's capitals as small letters; all else as it is.
std::string lower_case(std::string_view text);

/// Bytes: 4096, 4K, 4KiB, 1M, 2G, 1T; binary units, up to 1 TiB. A UsageError that begins with `flag` for anything
/// else.
std::int64_t parse_size(const std::string& flag, const std::string& text);
/// What stands between commas; empty parts too.
std::vector<std::string> split_list(const std::string& list);

}  // namespace phalanx
