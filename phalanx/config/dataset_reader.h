// Reads the tables of data sets (dataset_tables.h) from TOML.
#pragma once

#include <toml++/toml.h>

#include <string>
#include <string_view>

#include "phalanx/config/dataset_tables.h"

namespace phalanx::config {

/// `label`: "[training] datasets". `source`: the file, whose lines errors name;
/// of a flag, the flag. Throws ConfigError.
Datasets read_datasets(const toml::array& tables, std::string_view label, const std::string& source, bool is_file);
/// The same from the text of a flag's value.
Datasets read_datasets(const std::string& text, std::string_view label, const std::string& flag);

}  // namespace phalanx::config
