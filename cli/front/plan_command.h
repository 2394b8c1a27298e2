// phalanx plan: shows which of three scenarios a model and its devices are, the layouts that fit, and the recommended
// one.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int plan_command(const Arguments& arguments);
extern const std::string_view kPlanHelp;

}  // namespace phalanx::cli
