// phalanx-worker bench: one rank of `phalanx bench comm`. Rank 0 prints the table as it grows and writes the files.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int bench_worker(const Arguments& arguments);

}  // namespace phalanx::cli
