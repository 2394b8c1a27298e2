#include "phalanx/base/env.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/base/parse_text.h"

namespace phalanx {
namespace {

[[noreturn]] void bad_env_value(const std::string& name, const std::string& value, const std::string& expected) {
  throw ConfigError(fmt::format("environment variable {}='{}': expected {}", name, value, expected));
}

std::string describe_range(IntRange range) {
  const IntRange all;
  if (range.min == all.min && range.max == all.max) return "an integer";
  if (range.max == all.max) return fmt::format("an integer of at least {}", range.min);
  if (range.min == all.min) return fmt::format("an integer of at most {}", range.max);
  return fmt::format("an integer from {} to {}", range.min, range.max);
}

void require_set(const std::string& name, bool is_set, const std::string& purpose) {
  if (is_set) return;
  throw ConfigError(fmt::format("environment variable {} is not set{}{}", name, purpose.empty() ? "" : ": ", purpose));
}

}  // namespace

std::optional<std::string> env_string(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<std::int64_t> env_int(const std::string& name, IntRange range) {
  const std::optional<std::string> text = env_string(name);
  if (!text) return std::nullopt;
  std::int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, status] = std::from_chars(text->data(), end, value);
  if (status != std::errc() || stop != end || value < range.min || value > range.max) {
    bad_env_value(name, *text, describe_range(range));
  }
  return value;
}

std::optional<double> env_double(const std::string& name) {
  const std::optional<std::string> text = env_string(name);
  if (!text) return std::nullopt;
  double value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, status] = std::from_chars(text->data(), end, value);  // independent of the locale
  if (status != std::errc() || stop != end) bad_env_value(name, *text, "a number");
  return value;
}

std::optional<bool> env_bool(const std::string& name) {
  const std::optional<std::string> text = env_string(name);
  if (!text) return std::nullopt;
  const std::string lower = lower_case(*text);
  if (lower == "1" || lower == "true" || lower == "yes" || lower == "on") return true;
  if (lower == "0" || lower == "false" || lower == "no" || lower == "off") return false;
  bad_env_value(name, *text, "one of 1, 0, true, false, yes, no, on, off");
}

std::optional<std::string> env_choice(const std::string& name, const std::vector<std::string>& choices) {
  std::optional<std::string> text = env_string(name);
  if (!text) return std::nullopt;
  if (std::find(choices.begin(), choices.end(), *text) == choices.end()) {
    bad_env_value(name, *text, fmt::format("one of {}{}", fmt::join(choices, ", "), did_you_mean(*text, choices)));
  }
  return text;
}

std::string require_env_string(const std::string& name, const std::string& purpose) {
  std::optional<std::string> value = env_string(name);
  require_set(name, value.has_value(), purpose);
  return *value;
}

std::int64_t require_env_int(const std::string& name, IntRange range, const std::string& purpose) {
  const std::optional<std::int64_t> value = env_int(name, range);
  require_set(name, value.has_value(), purpose);
  return *value;
}

}  // namespace phalanx
