// phalanx checkpoint inspect|verify|diff|consolidate|reshard: looks into checkpoints, checks, compares, rewrites them.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int checkpoint_command(const Arguments& arguments);

}  // namespace phalanx::cli
