// The process of `phalanx chat`.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int chat_worker(const Arguments& arguments);

}  // namespace phalanx::cli
