// phalanx-worker train: one rank of a training run.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int train_worker(const Arguments& arguments);

}  // namespace phalanx::cli
