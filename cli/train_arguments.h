// The command line of `phalanx train`, parsed by the front program and by the worker.
#pragma once

#include <string>
#include <vector>

#include "cli/command.h"

namespace phalanx::cli {

struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::string ranks;  // the value of -n; empty: not given
  bool print_config = false;
  bool print_config_reference = false;
};

/// Throws UsageError.
TrainArguments parse_train_arguments(const Arguments& arguments);

}  // namespace phalanx::cli
