// phalanx doctor --topology: what the machine has, how it is linked, and how fast each level is. Runs in the front.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int topology_command(const Arguments& arguments);

}  // namespace phalanx::cli
