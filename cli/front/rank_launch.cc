#include "cli/front/rank_launch.h"

#include <fmt/format.h>

#include <cstdlib>

#include "cli/front/launch_arguments.h"
#include "cli/front/launch_command.h"
#include "cli/front/worker_program.h"
#include "phalanx/base/error.h"
#include "phalanx/launch/rendezvous/worker_environment.h"

namespace phalanx::cli {

RankCount take_rank_count(Arguments& arguments) {
  RankCount count;
  std::string text;
  for (const char* name : {"-n", "--nproc-per-node", "--nproc_per_node"}) {
    if (take_option(arguments, name, text)) count.started = parse_rank_count(name, text);
  }
  const WorkerEnvironment started_by = read_worker_environment();
  // A single task of srun or mpirun may start its own ranks.
  count.launched = started_by.world_size > 1 || std::getenv("RANK") != nullptr;
  if (count.launched && count.started) {
    throw UsageError(fmt::format("-n starts ranks, but this process is itself a rank already, from {}: leave -n out",
                                 started_by.launcher));
  }
  count.world = count.launched ? started_by.world_size : count.started.value_or(1);
  return count;
}

void check_copies(std::int64_t tp, std::int64_t pp, const RankCount& count) {
  if (count.world % (tp * pp) == 0) return;
  throw UsageError(fmt::format("{} rank{}, but --tp x --pp is {}: expected a multiple of it, such as -n {}",
                               count.world, count.world == 1 ? "" : "s", tp * pp, tp * pp));
}

int run_ranks(const std::string& name, const Arguments& arguments, const RankCount& count,
              const std::vector<int>& stop_signals) {
  if (!count.started) become_worker(name, arguments);
  Arguments program = {worker_program(), name};
  program.insert(program.end(), arguments.begin(), arguments.end());
  return launch_ranks(name, program, *count.started, stop_signals);
}

}  // namespace phalanx::cli
