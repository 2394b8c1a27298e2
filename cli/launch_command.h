// phalanx launch [options] [--] PROGRAM [ARGUMENTS...]: runs a program as several ranks, on one machine or many.
#pragma once

#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/launch_arguments.h"

namespace phalanx::cli {

int launch_command(const Arguments& arguments);

/// Runs ranks under the supervisor; prints what went wrong once, after "phalanx NAME: ".
int launch_ranks(const std::string& name, const SupervisorOptions& options);

/// A program as ranks of this machine.
int launch_ranks(const std::string& name, const std::vector<std::string>& program, int ranks);

}  // namespace phalanx::cli
