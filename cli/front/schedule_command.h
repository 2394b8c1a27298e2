// phalanx schedule NAME: a pipeline schedule as table, bubble, memory, CSV and picture.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int schedule_command(const Arguments& arguments);
extern const std::string_view kScheduleHelp;

}  // namespace phalanx::cli
