// The ranks of `phalanx generate`.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int generate_worker(const Arguments& arguments);

}  // namespace phalanx::cli
