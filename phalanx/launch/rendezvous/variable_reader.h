// VariableReader: reads a launcher's variables and collects all errors, so that the user sees them at once. Used only
// by worker_environment.cc and launcher_variables.cc.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/launch/rendezvous/worker_environment.h"

namespace phalanx {

inline constexpr int kMaxWorldSize = 1 << 20;

class VariableReader {
 public:
  explicit VariableReader(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const std::string& name) const {
    auto value = lookup_(name);
    if (value && value->empty()) value.reset();
    return value;
  }
  std::string required_text(const std::string& name) {
    auto value = text(name);
    if (!value) missing_.push_back(name);
    return value.value_or("");
  }
  std::optional<int> integer(const std::string& name, int min, int max) {
    const auto value = text(name);
    if (!value) return std::nullopt;
    int number = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
    if (error == std::errc{} && end == value->data() + value->size() && number >= min && number <= max) return number;
    malformed_.push_back(fmt::format("{} is '{}' (expected an integer from {} to {})", name, *value, min, max));
    return min;
  }
  int required_integer(const std::string& name, int min, int max) {
    const auto value = integer(name, min, max);
    if (!value) missing_.push_back(name);
    return value.value_or(min);
  }
  void complain(std::string what) { malformed_.push_back(std::move(what)); }

  void throw_if_wrong(const std::string& advice) const {
    if (missing_.empty() && malformed_.empty()) return;
    std::string text = "the worker environment is incomplete or wrong: ";
    if (!missing_.empty()) text += fmt::format("not set: {}", fmt::join(missing_, ", "));
    if (!malformed_.empty()) text += fmt::format("{}{}", missing_.empty() ? "" : "; ", fmt::join(malformed_, "; "));
    throw ConfigError(text + advice);
  }
  bool has(const std::string& name) const { return text(name).has_value(); }
  bool all_good() const { return missing_.empty() && malformed_.empty(); }

 private:
  const EnvironmentLookup& lookup_;
  std::vector<std::string> missing_, malformed_;
};

}  // namespace phalanx
