// phalanx checkpoint inspect|verify|diff|consolidate|reshard: inspects, checks, compares and rewrites checkpoints.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int checkpoint_command(const Arguments& arguments);

}  // namespace phalanx::cli
