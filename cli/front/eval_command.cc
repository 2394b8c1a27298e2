#include "cli/front/eval_command.h"

#include <fmt/format.h>

#include <cstdio>

#include "cli/eval_arguments.h"
#include "cli/front/rank_launch.h"

namespace phalanx::cli {

int eval_command(const Arguments& arguments) {
  if (arguments.empty()) {
    fmt::print(stderr, "{}", kEvalHelp);
    return 2;
  }
  Arguments rest = arguments;
  const RankCount count = take_rank_count(rest);
  const EvalArguments parsed = parse_eval_arguments(rest);
  check_copies(parsed.tp, parsed.pp, count);
  return run_ranks("eval", rest, count);
}

}  // namespace phalanx::cli
