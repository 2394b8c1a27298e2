// Typed reads of environment variables.
//
// An empty variable counts as unset. A value that does not parse, or is out of range, is a ConfigError that names the
// variable, the value and what was expected. It is never silently replaced by a default.
//
//   const int threads = env_int("OMP_NUM_THREADS", {.min = 1}).value_or(default_threads);
//   const std::string level = env_choice("PHALANX_LOG_LEVEL", {"debug", "info", "warn", "error"}).value_or("info");
//   const int rank = require_env_int("RANK", {.min = 0});
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace phalanx {

struct IntRange {
  std::int64_t min = std::numeric_limits<std::int64_t>::min();
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
};

std::optional<std::string> env_string(const std::string& name);
std::optional<std::int64_t> env_int(const std::string& name, IntRange range = {});
std::optional<double> env_double(const std::string& name);
std::optional<bool> env_bool(const std::string& name);  // 1/0, true/false, yes/no, on/off in any case
std::optional<std::string> env_choice(const std::string& name, const std::vector<std::string>& choices);

/// As above; an unset variable is a ConfigError too. `purpose` is appended to it, e.g. "is set by phalanx launch".
std::string require_env_string(const std::string& name, const std::string& purpose = "");
std::int64_t require_env_int(const std::string& name, IntRange range = {}, const std::string& purpose = "");

}  // namespace phalanx
