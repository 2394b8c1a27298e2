// phalanx report RUN_FOLDER: writes the report.html of a run.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int report_command(const Arguments& arguments);
extern const std::string_view kReportHelp;

}  // namespace phalanx::cli
