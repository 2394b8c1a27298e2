#include "phalanx/report/differences.h"

#include <algorithm>
#include <map>

namespace phalanx::report {
namespace {

/// "steps" of "# steps is not set"; "" of another line.
std::string_view unset_key(std::string_view line) {
  constexpr std::string_view kBegin = "# ", kEnd = " is not set";
  if (!line.starts_with(kBegin) || !line.ends_with(kEnd)) return "";
  return line.substr(kBegin.size(), line.size() - kBegin.size() - kEnd.size());
}

}  // namespace

NamedValues config_values(std::string_view toml) {
  NamedValues values;
  std::string section;
  while (!toml.empty()) {
    const std::size_t length = std::min(toml.find('\n'), toml.size());
    const std::string_view line = toml.substr(0, length);
    toml.remove_prefix(std::min(length + 1, toml.size()));
    const std::size_t equals = line.find(" = ");
    if (line.starts_with('[') && line.ends_with(']')) {
      section = std::string(line.substr(1, line.size() - 2)) + ".";
    } else if (const std::string_view key = unset_key(line); !key.empty()) {
      values.emplace_back(section + std::string(key), "not set");
    } else if (equals != std::string_view::npos) {
      values.emplace_back(section + std::string(line.substr(0, equals)), line.substr(equals + 3));
    }
  }
  return values;
}

std::vector<ComparedValues> side_by_side(const std::vector<NamedValues>& lists) {
  std::vector<ComparedValues> all;
  std::map<std::string, std::size_t> places;
  for (std::size_t i = 0; i < lists.size(); ++i) {
    for (const auto& [name, value] : lists[i]) {
      const auto [place, is_new] = places.emplace(name, all.size());
      if (is_new) all.push_back({.name = name, .values = std::vector<std::optional<std::string>>(lists.size())});
      all[place->second].values[i] = value;
    }
  }
  return all;
}

std::vector<ComparedValues> differences(const std::vector<NamedValues>& lists) {
  auto all = side_by_side(lists);
  std::erase_if(all, [](const ComparedValues& one) {
    return std::ranges::all_of(one.values, [&](const auto& value) { return value == one.values.front(); });
  });
  return all;
}

}  // namespace phalanx::report
