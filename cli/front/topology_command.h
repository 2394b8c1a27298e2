// phalanx doctor --topology: the hardware of this machine, its links, and the speed of each level. It runs in the front
// program.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int topology_command(const Arguments& arguments);

}  // namespace phalanx::cli
