#include "cli/verify_arguments.h"

#include <fmt/format.h>

#include <cmath>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {

VerifyArguments parse_verify_arguments(const Arguments& arguments) {
  VerifyArguments parsed;
  CLI::App app;
  app.allow_extras();
  app.option_defaults()->disable_flag_override();
  add_ranks_option(app, parsed.ranks);
  app.add_option("--steps", parsed.steps);
  app.add_option("--tolerance", parsed.tolerance);
  add_repeated_option(app, "--layout", parsed.layouts);
  app.add_flag("--all", parsed.all);
  app.add_flag("--table", parsed.table);
  app.add_option("--json", parsed.json);
  parsed.overrides = parse_options(app, arguments);
  require_range("--steps", parsed.steps, 1);
  if (parsed.tolerance && (!(*parsed.tolerance > 0) || std::isinf(*parsed.tolerance))) {
    throw UsageError(fmt::format("--tolerance is '{}': expected a number above 0, such as 1e-5", *parsed.tolerance));
  }
  if (parsed.all && !parsed.layouts.empty()) {
    throw UsageError("--all checks every layout: leave --layout out, or name some without --all");
  }
  parsed.config = take_config_path(parsed.overrides, "verify");
  return parsed;
}

std::vector<config::NamedLayout> layouts_to_verify(const VerifyArguments& arguments, std::int64_t ranks,
                                                   std::vector<config::LeftOutLayout>* left_out) {
  std::vector<std::string> notes;  // reported before
  const config::TrainConfig config = config::read_config(arguments.config, arguments.overrides, &notes);
  if (arguments.all) return config::all_layouts(config, ranks, left_out);
  std::vector<config::NamedLayout> layouts;
  for (const std::string& name : arguments.layouts) layouts.push_back(config::with_layout(config, name, ranks));
  if (layouts.empty()) {
    config::plan_run(config, ranks);
    layouts.push_back({.name = "the configuration's", .config = config, .ranks = ranks});
  }
  return layouts;
}

}  // namespace phalanx::cli
