// The command line of `phalanx bench comm`, parsed by the front program and by the worker.
#pragma once

#include <string>

#include "cli/command.h"
#include "phalanx/measure/comm_bench_options.h"

namespace phalanx::cli {

struct BenchArguments {
  std::string ranks;  // as written; empty: not given
  measure::CommBenchOptions options;
  std::string csv, json, plot;  // files; empty: none
};

/// Throws UsageError. Option names may use - or _, and nccl-tests' spellings are accepted.
BenchArguments parse_bench_arguments(const Arguments& arguments);

extern const std::string_view kBenchHelp;

}  // namespace phalanx::cli
