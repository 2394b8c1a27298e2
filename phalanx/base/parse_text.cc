#include "phalanx/base/parse_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "phalanx/base/error.h"

namespace phalanx {

std::string lower_case(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

std::int64_t parse_size(const std::string& flag, const std::string& text) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  std::string unit(rest, end);
  std::ranges::transform(unit, unit.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  for (const char* ending : {"IB", "B"}) {
    if (unit.ends_with(ending)) {
      unit.erase(unit.size() - std::string(ending).size());
      break;
    }
  }
  const std::vector<std::string> units{"", "K", "M", "G", "T"};
  const auto found = std::ranges::find(units, unit);
  const auto shift = 10 * (found - units.begin());
  if (error != std::errc{} || found == units.end() || value < 0 || value > (std::int64_t{1} << 40) >> shift) {
    throw UsageError(
        fmt::format("{}: '{}' is no size; expected a number of bytes, or with K, M, G or T behind it", flag, text));
  }
  return value << shift;
}

std::vector<std::string> split_list(const std::string& list) {
  std::vector<std::string> items;
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t comma = std::min(list.find(',', at), list.size());
    items.push_back(list.substr(at, comma - at));
    at = comma + 1;
  }
  return items;
}

}  // namespace phalanx
