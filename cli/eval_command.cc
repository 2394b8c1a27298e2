#include "cli/eval_command.h"

#include <fmt/format.h>

#include <cstdio>

#include "cli/eval_arguments.h"
#include "cli/rank_launch.h"

namespace phalanx::cli {

int eval_command(const Arguments& arguments) {
  if (arguments.empty()) {
    fmt::print(stderr, "{}", kEvalHelp);
    return 2;
  }
  const EvalArguments parsed = parse_eval_arguments(without_rank_count(arguments));
  return run_in_ranks("eval", arguments, parsed.tp * parsed.pp);
}

}  // namespace phalanx::cli
