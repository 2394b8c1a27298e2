// phalanx chat: parses the command line, then becomes the worker.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int chat_command(const Arguments& arguments);

}  // namespace phalanx::cli
