#include "cli/train_arguments.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/launch_command.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {

TrainArguments parse_train_arguments(Arguments arguments) {
  TrainArguments parsed;
  std::string ranks;
  for (const char* name : {"-n", "--nproc-per-node", "--nproc_per_node"}) {
    if (!take_option(arguments, name, ranks)) continue;
    parsed.ranks = parse_rank_count(name, ranks);
  }
  parsed.print_config_reference = take_flag(arguments, "--print-config-reference");
  parsed.print_config = take_flag(arguments, "--print-config");
  if (parsed.print_config_reference) {
    refuse_rest(arguments, "train --print-config-reference");
    return parsed;
  }

  auto config = std::find_if(arguments.begin(), arguments.end(),
                             [](const std::string& a) { return a.ends_with(".toml") && !a.starts_with("-"); });
  if (config == arguments.end() && !arguments.empty() && !arguments[0].starts_with("-")) config = arguments.begin();
  if (config == arguments.end()) throw UsageError("expected a configuration file: phalanx train CONFIG.toml");
  parsed.config = *config;
  arguments.erase(config);
  parsed.overrides = std::move(arguments);
  return parsed;
}

}  // namespace phalanx::cli
