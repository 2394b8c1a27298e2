#include "cli/generate_command.h"

#include <fmt/format.h>

#include <cstdio>

#include "cli/generate_arguments.h"
#include "cli/rank_launch.h"

namespace phalanx::cli {

int generate_command(const Arguments& arguments) {
  if (arguments.empty()) {
    fmt::print(stderr, "{}", kGenerateHelp);
    return 2;
  }
  const GenerateArguments parsed = parse_generate_arguments(without_rank_count(arguments));
  return run_in_ranks("generate", arguments, parsed.tp * parsed.pp);
}

}  // namespace phalanx::cli
