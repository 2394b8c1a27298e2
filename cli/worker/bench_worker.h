// phalanx-worker bench: one rank of `phalanx bench comm`. Rank 0 prints the table row by row and writes the files.
#pragma once

#include <vector>

#include "cli/command.h"
#include "phalanx/measure/collectives/comm_bench_call.h"

namespace phalanx::cli {

/// `baselines`: other libraries that --backends may name, beside torch's gloo.
int bench_worker(const Arguments& arguments, const std::vector<measure::BenchBaseline>& baselines = {});

}  // namespace phalanx::cli
