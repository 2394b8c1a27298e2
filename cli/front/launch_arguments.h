// The command line of `phalanx launch`: torchrun's flags, with - or _ between words, and PET_<NAME> in the environment
// where a flag is not given.
#pragma once

#include <filesystem>
#include <string>

#include "cli/command.h"
#include "phalanx/launch/supervisor/supervisor.h"

namespace phalanx::cli {

extern const std::string_view kLaunchHelp;

struct LaunchArguments {
  bool help = false;
  SupervisorOptions options;  // its command: the program and its arguments, untouched
};

/// Throws UsageError.
LaunchArguments parse_launch_arguments(const Arguments& arguments,
                                       const EnvironmentMap& environment = current_environment());

/// "auto" (a rank per GPU that is visible, or per core where there is none), "gpu", "cpu", or a number. `flag` is named
/// in errors; below `root` the GPUs are looked for (visible_gpus.h).
int parse_rank_count(const std::string& flag, const std::string& value,
                     const EnvironmentMap& environment = current_environment(),
                     const std::filesystem::path& root = "/");

}  // namespace phalanx::cli
