// phalanx trace: says from the flight recorder files that ranks left who is where and who is missing (analyze), and has
// the ranks of a running job write them (dump).
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int trace_command(const Arguments& arguments);
extern const std::string_view kTraceHelp;

}  // namespace phalanx::cli
