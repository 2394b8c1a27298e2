// `phalanx verify`: proves that a layout trains as one rank does.
#pragma once

#include <string_view>

#include "cli/command.h"

namespace phalanx::cli {

extern const std::string_view kVerifyHelp;
int verify_command(const Arguments& arguments);

}  // namespace phalanx::cli
