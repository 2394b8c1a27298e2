#include "cli/rank_launch.h"

#include <fmt/format.h>

#include <cstdlib>
#include <optional>

#include "cli/launch_arguments.h"
#include "cli/launch_command.h"
#include "cli/worker_program.h"
#include "phalanx/base/error.h"
#include "phalanx/launch/worker_environment.h"

namespace phalanx::cli {
namespace {

std::optional<int> take_rank_count(Arguments& arguments) {
  std::optional<int> ranks;
  std::string count;
  for (const char* name : {"-n", "--nproc-per-node", "--nproc_per_node"}) {
    if (take_option(arguments, name, count)) ranks = parse_rank_count(name, count);
  }
  return ranks;
}

}  // namespace

Arguments without_rank_count(Arguments arguments) {
  take_rank_count(arguments);
  return arguments;
}

int run_in_ranks(const std::string& name, Arguments arguments, std::int64_t parts) {
  const std::optional<int> ranks = take_rank_count(arguments);
  const WorkerEnvironment started_by = read_worker_environment();
  const bool launched = started_by.world_size > 1 || std::getenv("RANK") != nullptr;
  if (launched && ranks) throw UsageError("-n starts ranks, but this process is itself a rank already: leave it out");
  const std::int64_t world = launched ? started_by.world_size : ranks.value_or(1);
  if (world % parts != 0) {
    throw UsageError(fmt::format("{} rank{}, but --tp x --pp is {}: expected a multiple of it, such as -n {}", world,
                                 world == 1 ? "" : "s", parts, parts));
  }
  if (!ranks) become_worker(name, arguments);
  Arguments program = {worker_program(), name};
  program.insert(program.end(), arguments.begin(), arguments.end());
  return launch_ranks(name, program, *ranks);
}

}  // namespace phalanx::cli
