#include "cli/front/train_arguments.h"

namespace phalanx::cli {

TrainArguments parse_train_arguments(Arguments arguments) {
  TrainArguments parsed;
  parsed.print_config_reference = take_flag(arguments, "--print-config-reference");
  parsed.print_config = take_flag(arguments, "--print-config");
  if (parsed.print_config_reference) {
    refuse_rest(arguments, "train --print-config-reference");
    return parsed;
  }

  parsed.config = take_config_path(arguments, "train");
  parsed.overrides = std::move(arguments);
  return parsed;
}

}  // namespace phalanx::cli
