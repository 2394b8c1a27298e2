// phalanx launch [options] [--] PROGRAM [ARGUMENTS...]: runs a program as several ranks, on one node or many.
#pragma once

#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/front/launch_arguments.h"

namespace phalanx::cli {

int launch_command(const Arguments& arguments);

/// Runs ranks under the supervisor and returns the exit status. Prints an error once, after "phalanx NAME: ".
int launch_ranks(const std::string& name, const SupervisorOptions& options);

/// Runs one of our own programs as ranks of this node. stop_signals: as in SupervisorOptions.
int launch_ranks(const std::string& name, const std::vector<std::string>& program, int ranks,
                 const std::vector<int>& stop_signals = {});

}  // namespace phalanx::cli
