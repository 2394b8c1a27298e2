// A list of tables as the value of a flag: inline tables in a TOML list.
//
//   toml::table root;
//   const toml::array& tables = tables_in_flag(root, text, "--training.datasets", R"([{path = "a"}])");
#pragma once

#include <toml++/toml.h>

#include <string>
#include <string_view>

namespace phalanx::config {

/// `root` holds what is returned. `example` is shown by the ConfigError of a text that is no list.
const toml::array& tables_in_flag(toml::table& root, const std::string& text, std::string_view flag,
                                  std::string_view example);

}  // namespace phalanx::config
