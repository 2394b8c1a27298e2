// A value as it was written, in a file or on the command line, and its way into a TrainConfig.
//
//   assign(config, key, given_from(node, "llama.toml"));   // ConfigError: where, key, found, expected
#pragma once

#include <toml++/toml.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "phalanx/config/config.h"
#include "phalanx/config/config_schema.h"

namespace phalanx::config {

struct GivenValue {
  /// Of a flag: its text. A list of anything but strings stays a list of TOML, which must outlive this.
  std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<std::string>, const toml::array*>
      value;
  std::string shown;  // as in the file
  std::string where;  // "llama.toml:12" or "--training.steps"
  std::string file = {};
  bool from_flag = false;
};

GivenValue given_from(const toml::node& node, const std::string& source);

/// An integer from 1, also if it was written as text.
std::optional<std::int64_t> count_in(const GivenValue& given);

/// Throws ConfigError for a value of another type, out of the key's range, or not among its choices.
void assign(TrainConfig& config, const Key& key, GivenValue given);

}  // namespace phalanx::config
