#include "cli/train_arguments.h"

#include <fmt/format.h>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {

TrainArguments parse_train_arguments(const Arguments& arguments) {
  TrainArguments parsed;
  CLI::App app;
  app.allow_extras();
  app.option_defaults()->disable_flag_override();
  add_ranks_option(app, parsed.ranks);
  app.add_flag("--print-config-reference", parsed.print_config_reference);
  app.add_flag("--print-config", parsed.print_config);
  parsed.overrides = parse_options(app, arguments);
  if (!parsed.print_config_reference) {
    parsed.config = take_config_path(parsed.overrides, "train");
  } else if (!parsed.overrides.empty()) {
    throw UsageError(fmt::format("unexpected argument '{}': --print-config-reference takes none", parsed.overrides[0]));
  }
  return parsed;
}

}  // namespace phalanx::cli
