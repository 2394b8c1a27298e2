// Parses numbers, sizes and lists from command lines.
//
//   parse_whole<std::int64_t>("12");         // 12; nullopt for "12 " or "twelve"
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

/// The number, if the whole text is one number; otherwise nullopt.
template <class T>
std::optional<T> parse_whole(std::string_view text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || rest != end) return std::nullopt;
  return value;
}

/// Converts ASCII capitals to small letters; other characters stay unchanged.
std::string lower_case(std::string_view text);

/// Parses a number of bytes: 4096, 4K, 4KiB, 1M, 2G, 1T; binary units, up to 1 TiB. Throws a UsageError that begins
/// with `flag` for any other text.
std::int64_t parse_size(const std::string& flag, const std::string& text);
/// The texts between the commas, including empty ones.
std::vector<std::string> split_list(const std::string& list);

}  // namespace phalanx
