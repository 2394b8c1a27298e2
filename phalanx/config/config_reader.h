// Reads a configuration file and its flags into a TrainConfig: names, types, ranges and choices of single keys. What
// keys say together is checked by config_checks.h.
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

namespace phalanx::train {

/// Takes the preset of `--like`, then the file, then the other flags. Wrong keys and values become `problems`; text
/// that is not TOML is a ConfigError, flags that are not `--section.key value` are a UsageError. Returns the keys whose
/// values were not taken, as "section.key". `notes`: what is to be said though nothing is wrong.
std::set<std::string> read_keys(TrainConfig& config, std::string_view toml, const std::string& source,
                                const std::vector<std::string>& flags, ConfigProblems& problems,
                                std::vector<std::string>& notes);

/// A configuration as far as it could be read, and what is wrong with it.
struct ConfigReading {
  TrainConfig config = {};
  std::set<std::string> wrong_keys = {};
  ConfigProblems problems = {};
  std::vector<std::string> notes = {};  // keys that are not read, flags that are given twice
  std::string source;
};

/// parse_config() before it throws, for who has more to check.
ConfigReading take_config(std::string_view toml, const std::string& source, const std::vector<std::string>& overrides);

/// Logs them once, or gives them to `notes`.
void take_notes(const std::vector<std::string>& found, std::vector<std::string>* notes);

/// The text of a configuration file. ConfigError where it cannot be read.
std::string config_text(const std::string& path);

}  // namespace phalanx::train
