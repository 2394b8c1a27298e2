#include "cli/front/eval_command.h"

#include "cli/eval_arguments.h"
#include "cli/front/rank_launch.h"

namespace phalanx::cli {

int eval_command(const Arguments& arguments) {
  const EvalArguments parsed = parse_eval_arguments(arguments);
  return run_ranks("eval", arguments, model_rank_count(parsed));
}

}  // namespace phalanx::cli
