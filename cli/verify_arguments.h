// The command line of `phalanx verify`, parsed by the front program and by the worker.
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
  std::string ranks;  // the value of -n; empty: not given
  std::int64_t steps = 3;
  std::optional<double> tolerance;  // for gradients at equal weights, relative to their norm
  bool all = false;
  bool table = false;
  std::vector<std::string> layouts;
  std::string json;  // a file's path
};

/// Throws UsageError.
VerifyArguments parse_verify_arguments(const Arguments& arguments);

/// The layouts to check on `ranks` ranks: the configuration's own layout, the named ones, or all. Throws ConfigError.
/// Those of all that cannot be checked go to `left_out`.
std::vector<config::NamedLayout> layouts_to_verify(const VerifyArguments& arguments, std::int64_t ranks,
                                                   std::vector<config::LeftOutLayout>* left_out = nullptr);

}  // namespace phalanx::cli
