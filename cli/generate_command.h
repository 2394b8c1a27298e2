// phalanx generate: continues prompts with a trained model. Runs in phalanx-worker.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int generate_command(const Arguments& arguments);

}  // namespace phalanx::cli
