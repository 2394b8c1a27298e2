// phalanx trace analyze FOLDER: says from the ranks' flight recorder files who is where, and who is missing.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int trace_command(const Arguments& arguments);
extern const std::string_view kTraceHelp;

}  // namespace phalanx::cli
