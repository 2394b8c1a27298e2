// phalanx bench: forwards `bench train` (bench_train_command.h). For `bench comm` it checks the command line and starts
// the ranks; bench_worker.h measures.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int bench_command(const Arguments& arguments);

}  // namespace phalanx::cli
