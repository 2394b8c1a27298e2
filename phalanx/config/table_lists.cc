#include "phalanx/config/table_lists.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"

namespace phalanx::config {

void each_table(const toml::array& tables, const TableList& list,
                const std::function<void(const toml::table& table, const std::string& where)>& use) {
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const toml::node& node = *tables.get(i);
    const std::string file = list.is_file ? fmt::format("{}:{}", list.source, node.source().begin.line) : list.source;
    const std::string where = fmt::format("{}: {}, {} {}", file, list.label, list.kind, i + 1);
    if (!node.is_table()) {
      throw ConfigError(fmt::format("{}: expected a table with {}, found another value", where, list.expected));
    }
    use(*node.as_table(), where);
  }
}

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
