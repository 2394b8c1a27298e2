// phalanx launch [options] [--] PROGRAM [ARGUMENTS...]: runs a program as several ranks of this machine.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"

namespace phalanx::cli {

int launch_command(const Arguments& arguments);
extern const std::string_view kLaunchHelp;

struct LaunchArguments {
  int ranks = 1;
  bool help = false;
  std::vector<std::string> program;  // and its arguments, untouched
};

/// Understands torchrun's spellings, with - or _ between words. Throws UsageError.
LaunchArguments parse_launch_arguments(const Arguments& arguments);

/// Runs a program as ranks under the supervisor; prints the failing rank's error once, after "phalanx NAME: ".
int launch_ranks(const std::string& name, const std::vector<std::string>& program, int ranks);

/// "auto" (a rank per GPU, or per core where there is none), "gpu", "cpu", or a number. `flag` is named in errors.
int parse_rank_count(const std::string& flag, const std::string& value);

}  // namespace phalanx::cli
