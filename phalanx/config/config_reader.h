// Reads a configuration file and its flags into a TrainConfig. It checks names, types, ranges and choices of single
// keys; config_checks.h checks keys together.
//
//   ConfigProblems problems;
//   const auto wrong_keys = read_keys(config, "[training]\nsteps = 10\n", "llama.toml", flags, problems, notes);
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/config/config.h"
#include "phalanx/config/config_problems.h"

namespace phalanx::config {

/// Applies the preset of `--like`, then the file, then the other flags. Wrong keys and values become `problems`. Throws
/// ConfigError for text that is not TOML, and UsageError for flags that are not `--section.key value`. Returns the keys
/// whose values were rejected, as "section.key". `notes` gets remarks that are not errors.
std::set<std::string> read_keys(TrainConfig& config, std::string_view toml, const std::string& source,
                                const std::vector<std::string>& flags, ConfigProblems& problems,
                                std::vector<std::string>& notes);

/// True if a flag of this name without = is complete, so that only `true` or `false` may follow it as its value:
/// --section.key of a boolean key, or --section.no-key.
bool is_boolean_flag(std::string_view flag);
inline bool is_boolean_text(std::string_view text) { return text == "true" || text == "false"; }

/// A configuration as far as it could be read, and its problems.
struct ConfigReading {
  TrainConfig config = {};
  std::set<std::string> wrong_keys = {};
  ConfigProblems problems = {};
  std::vector<std::string> notes = {};  // keys that are not read, flags that are given twice
  std::string source;
};

/// parse_config() without the throw at the end, for callers with more checks.
ConfigReading take_config(std::string_view toml, const std::string& source, const std::vector<std::string>& overrides);

/// Writes the notes to `notes`; if that is null, logs each of them once.
void take_notes(const std::vector<std::string>& found, std::vector<std::string>* notes);

/// Returns the text of a configuration file. Throws ConfigError if it cannot be read.
std::string config_text(const std::string& path);

}  // namespace phalanx::config
