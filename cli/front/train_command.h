// phalanx train [-n N] CONFIG.toml [--section.key value ...]: the part in the front program; train_worker.h trains.
//
// It checks the configuration once, in milliseconds, before any rank starts. Then this process becomes the worker (one
// rank, or a rank that a launcher started), or supervises N workers.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int train_command(const Arguments& arguments);
extern const std::string_view kTrainHelp;

}  // namespace phalanx::cli
