// phalanx bench: passes `bench train` on (bench_train_command.h). Of `bench comm` it is the front's half: it checks the
// command line and starts the ranks; bench_worker.h measures.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int bench_command(const Arguments& arguments);

}  // namespace phalanx::cli
