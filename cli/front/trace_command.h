// phalanx trace. `analyze` reads the flight recorder files of the ranks, and shows where each rank is and which ranks
// are missing. `dump` makes the ranks of a running job write these files.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int trace_command(const Arguments& arguments);
extern const std::string_view kTraceHelp;

}  // namespace phalanx::cli
