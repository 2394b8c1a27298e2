// phalanx train [-n N] CONFIG.toml [--section.key value ...]: the front's half; train_worker.h does the training.
//
// The configuration is checked here, in milliseconds and once, before any rank starts. Then this process becomes the
// worker (one rank, or a rank that a launcher started), or supervises N of them.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int train_command(const Arguments& arguments);
extern const std::string_view kTrainHelp;

}  // namespace phalanx::cli
