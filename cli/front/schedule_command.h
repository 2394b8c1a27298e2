// phalanx schedule NAME: shows a pipeline schedule: its table, bubble and memory, as CSV and as a picture.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int schedule_command(const Arguments& arguments);
extern const std::string_view kScheduleHelp;

}  // namespace phalanx::cli
