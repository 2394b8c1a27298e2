#include "cli/front/rank_launch.h"

#include <fmt/format.h>

#include <cstdlib>

#include "cli/front/launch_arguments.h"
#include "cli/front/launch_command.h"
#include "cli/front/worker_program.h"
#include "phalanx/base/error.h"
#include "phalanx/launch/rendezvous/worker_environment.h"

namespace phalanx::cli {

RankCount rank_count(const std::string& ranks) {
  RankCount count;
  if (!ranks.empty()) count.started = parse_rank_count("-n", ranks);
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

RankCount model_rank_count(const ModelArguments& parsed) {
  const RankCount count = rank_count(parsed.ranks);
  const std::int64_t copy = parsed.tp * parsed.pp;
  if (count.world % copy == 0) return count;
  throw UsageError(fmt::format("{} rank{}, but --tp x --pp is {}: expected a multiple of it, such as -n {}",
                               count.world, count.world == 1 ? "" : "s", copy, copy));
}

int run_ranks(const std::string& name, const Arguments& arguments, const RankCount& count,
              const std::vector<int>& stop_signals) {
  if (!count.started) become_worker(name, arguments);
  Arguments program = {worker_program(), name};
  program.insert(program.end(), arguments.begin(), arguments.end());
  return launch_ranks(name, program, *count.started, stop_signals);
}

}  // namespace phalanx::cli
