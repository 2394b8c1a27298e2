// The command line of `phalanx plan`.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cli/command.h"
#include "phalanx/config/config.h"
#include "phalanx/plan/layout_search.h"

namespace phalanx::cli {

struct PlanArguments {
  config::TrainConfig config;     // the training to plan for; its own layout is ignored
  config::TrainConfig reference;  // the recommended section is added to this: the file, or nothing
  std::string config_path;        // empty: the model comes without a file
  std::vector<std::string> overrides;
  plan::Devices devices;
  double headroom = 0.05;
  std::size_t max_rows = 12;
  std::vector<std::string> layouts;  // by name; empty: search all layouts
  std::string json, toml, svg;       // files; empty: none
};

/// Throws UsageError and ConfigError.
PlanArguments parse_plan_arguments(const Arguments& arguments);

/// The given layouts, in their order. Throws ConfigError for unknown names.
std::vector<plan::Candidate> given_layouts(const PlanArguments& arguments, const plan::SearchOptions& options);

/// The configuration with the settings of a layout.
config::TrainConfig with_settings(const PlanArguments& arguments, const plan::Layout& layout);

}  // namespace phalanx::cli
