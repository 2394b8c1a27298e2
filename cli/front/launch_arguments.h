// The command line of `phalanx launch`. It has torchrun's flags, with - or _ between words. If a flag is not given, the
// environment variable PET_<NAME> is used.
#pragma once

#include <filesystem>
#include <string>

#include "cli/command.h"
#include "phalanx/launch/supervisor/supervisor.h"

namespace phalanx::cli {

extern const std::string_view kLaunchHelp;

struct LaunchArguments {
  bool help = false;
  SupervisorOptions options;  // options.command: the program and its arguments, unchanged
};

/// Throws UsageError.
LaunchArguments parse_launch_arguments(const Arguments& arguments,
                                       const EnvironmentMap& environment = current_environment());

/// Parses "auto" (one rank per visible GPU, or per core if there are no GPUs), "gpu", "cpu", or a number. Errors name
/// `flag`. GPUs are searched below `root` (visible_gpus.h).
int parse_rank_count(const std::string& flag, const std::string& value,
                     const EnvironmentMap& environment = current_environment(),
                     const std::filesystem::path& root = "/");

}  // namespace phalanx::cli
