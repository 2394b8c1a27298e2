#include "phalanx/config/flag_tables.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"

namespace phalanx::config {

const toml::array& tables_in_flag(toml::table& root, const std::string& text, std::string_view flag,
                                  std::string_view example) {
  try {
    root = toml::parse("value = " + text);
  } catch (const toml::parse_error& error) {
    throw ConfigError(fmt::format("{}: {}: expected a TOML list of tables, as {}", flag, error.description(), example));
  }
  const toml::array* const tables = root["value"].as_array();
  if (tables == nullptr || root.size() != 1) {
    throw ConfigError(fmt::format("{} is {}: expected a TOML list of tables, as {}", flag, text, example));
  }
  return *tables;
}

}  // namespace phalanx::config
