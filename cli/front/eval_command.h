// phalanx eval: parses the command line, then starts ranks or becomes one.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int eval_command(const Arguments& arguments);

}  // namespace phalanx::cli
