// phalanx verify: proves that a layout gives the same training as one rank.
#pragma once

#include <string_view>

#include "cli/command.h"

namespace phalanx::cli {

extern const std::string_view kVerifyHelp;
int verify_command(const Arguments& arguments);

}  // namespace phalanx::cli
