// The command line of `phalanx plan`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "phalanx/config/config.h"
#include "phalanx/plan/layout_search.h"

namespace phalanx::cli {

struct PlanArguments {
  train::TrainConfig config;     // what is planned, its own layout aside
  train::TrainConfig reference;  // what the recommended section is added to: the file, or nothing
  std::string config_path;       // empty: a model without a file
  std::vector<std::string> overrides;
  plan::Devices devices;
  double headroom = 0.05;
  std::size_t max_rows = 12;
  std::vector<std::string> layouts;  // by name; empty: all are searched
  std::string json, toml, svg;       // files; empty: none
};

/// Throws UsageError and ConfigError.
PlanArguments parse_plan_arguments(Arguments arguments);

/// The layouts given, in their order. ConfigError for names that are none.
std::vector<plan::Candidate> given_layouts(const PlanArguments& arguments, const plan::SearchOptions& options);

/// The configuration with a layout's settings.
train::TrainConfig with_settings(const PlanArguments& arguments, const plan::Layout& layout);

}  // namespace phalanx::cli
