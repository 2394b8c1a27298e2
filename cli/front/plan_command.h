// phalanx plan: which of three scenarios a model and devices are, the layouts that fit, and the one to take.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int plan_command(const Arguments& arguments);
extern const std::string_view kPlanHelp;

}  // namespace phalanx::cli
