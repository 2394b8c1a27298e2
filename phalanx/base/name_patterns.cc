#include "phalanx/base/name_patterns.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <numeric>

#include "phalanx/base/error.h"

namespace phalanx {

std::size_t pattern_distance(std::string_view pattern, std::string_view name) {
  // costs[j]: the cost of the pattern so far against the first j characters of the name.
  std::vector<std::size_t> costs(name.size() + 1), next(name.size() + 1);
  std::iota(costs.begin(), costs.end(), std::size_t{0});
  for (const char c : pattern) {
    const bool any = c == '*';
    next[0] = costs[0] + (any ? 0 : 1);
    for (std::size_t j = 1; j <= name.size(); ++j) {
      const std::size_t same = costs[j - 1] + (any || c == '?' || c == name[j - 1] ? 0 : 1);
      next[j] = std::min({same, costs[j] + (any ? 0 : 1), next[j - 1] + (any ? 0 : 1)});
    }
    costs.swap(next);
  }
  return costs.back();
}

std::string without_numbers(std::string_view name) {
  std::string text;
  for (const char c : name) {
    const bool is_digit = c >= '0' && c <= '9';
    const bool in_number = !text.empty() && text.back() == '*' && is_digit;
    const bool begins_number = is_digit && !text.empty() && text.back() == '.';
    if (!in_number) text += begins_number ? '*' : c;
  }
  return text;
}

bool matches_pattern(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

std::vector<bool> matching_names(const std::string& what, const std::vector<std::string>& patterns,
                                 const std::vector<std::string>& names) {
  std::vector<bool> matched(names.size(), false);
  for (const auto& pattern : patterns) {
    bool any = false;
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (!matches_pattern(pattern, names[i])) continue;
      matched[i] = true;
      any = true;
    }
    if (any) continue;
    const auto nearest = std::min_element(names.begin(), names.end(), [&](const auto& a, const auto& b) {
      return pattern_distance(pattern, a) < pattern_distance(pattern, b);
    });
    throw ConfigError(fmt::format("{}: pattern '{}' matches none of the {} parameters{}", what, pattern, names.size(),
                                  nearest == names.end() ? "" : fmt::format("; the nearest is '{}'", *nearest)));
  }
  return matched;
}

}  // namespace phalanx
