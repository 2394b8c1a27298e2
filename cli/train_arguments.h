// The command line of `phalanx train`, read by the front and by the worker alike.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"

namespace phalanx::cli {

struct TrainArguments {
  std::optional<int> ranks;  // -n
  std::string config;
  std::vector<std::string> overrides;
  bool print_config = false;
  bool print_config_reference = false;
};

/// Throws UsageError.
TrainArguments parse_train_arguments(Arguments arguments);

}  // namespace phalanx::cli
