// Keys and their values as text: for error messages, for printed configurations and for the reference.
//
//   key_label("training", "steps");   // "[training] steps"
//   toml_value(key.slot(config));     // "1000"
#pragma once

#include <string>
#include <string_view>

#include "phalanx/config/config_schema.h"

namespace phalanx::config {

std::string key_label(std::string_view section, std::string_view name);  // "[training] steps"

/// "boolean", "integer", "number", "string", or a list: "list of strings", "list of numbers", "list of tables".
std::string_view type_name(const Slot& slot);
std::string toml_value(const Slot& slot);            // as in a file; empty for an unset optional
std::string expectation(const Key& key, Slot slot);  // "an integer, 1 or more"

}  // namespace phalanx::config
