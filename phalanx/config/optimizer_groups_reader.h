// Reads the tables of optimizer groups (optimizer_groups.h) from TOML.
#pragma once

#include <toml++/toml.h>

#include <string>
#include <string_view>

#include "phalanx/config/optimizer_groups.h"

namespace phalanx::config {

/// `label`: "[optimizer] groups". `source`: the file, whose lines errors name; of a flag, the flag. Throws ConfigError.
OptimizerGroups read_optimizer_groups(const toml::array& tables, std::string_view label, const std::string& source,
                                      bool is_file);
/// The same from the text of a flag's value.
OptimizerGroups read_optimizer_groups(const std::string& text, std::string_view label, const std::string& flag);

}  // namespace phalanx::config
