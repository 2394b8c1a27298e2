// The command line of `phalanx train`.
#pragma once

#include <string>
#include <vector>

#include "cli/command.h"

namespace phalanx::cli {

struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;
  bool print_config = false;
  bool print_config_reference = false;
};

/// Parses the arguments without -n, which rank_launch.h takes. Throws UsageError.
TrainArguments parse_train_arguments(Arguments arguments);

}  // namespace phalanx::cli
