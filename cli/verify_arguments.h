// The command line of `phalanx verify`, read by the front and by the worker alike.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "phalanx/config/layouts.h"

namespace phalanx::cli {

struct VerifyArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::int64_t steps = 3;
  std::optional<double> tolerance;  // of gradients at equal weights, relative to their norm
  bool all = false;
  bool table = false;
  std::vector<std::string> layouts;
  std::string json;  // a file's path
};

/// Without -n, which is the launcher's. Throws UsageError.
VerifyArguments parse_verify_arguments(Arguments arguments);

/// What is to be checked on so many ranks: the configuration's own layout, the named ones, or all. ConfigError.
std::vector<train::NamedLayout> layouts_to_verify(const VerifyArguments& arguments, std::int64_t ranks);

}  // namespace phalanx::cli
