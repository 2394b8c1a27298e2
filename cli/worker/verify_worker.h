// The ranks of `phalanx verify`.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int verify_worker(const Arguments& arguments);

}  // namespace phalanx::cli
