// Lists of tables: those of a file, and as the value of a flag, where they are inline tables in a TOML list.
//
//   toml::table root;
//   const toml::array& tables = tables_in_flag(root, text, "--training.datasets", R"([{path = "a"}])");
#pragma once

#include <toml++/toml.h>

#include <functional>
#include <string>
#include <string_view>

namespace phalanx::config {

/// What a list of tables is called in errors.
struct TableList {
  std::string_view label;     // "[training] datasets"
  std::string source;         // the file, or of a flag the flag
  bool is_file = false;       // then errors name lines of it
  std::string_view kind;      // of one table: "set"
  std::string_view expected;  // in a table: "a path"
};

/// Calls `use` with each table and its place, "llama.toml:7: [training] datasets, set 2". Throws ConfigError for an
/// element that is no table.
void each_table(const toml::array& tables, const TableList& list,
                const std::function<void(const toml::table& table, const std::string& where)>& use);

/// `root` holds what is returned. `example` is shown by the ConfigError of a text that is no list.
const toml::array& tables_in_flag(toml::table& root, const std::string& text, std::string_view flag,
                                  std::string_view example);

}  // namespace phalanx::config
