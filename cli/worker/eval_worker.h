// The ranks of `phalanx eval`.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int eval_worker(const Arguments& arguments);

}  // namespace phalanx::cli
