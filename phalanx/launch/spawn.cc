#include "phalanx/launch/spawn.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

#include "phalanx/base/cpu.h"
#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/launch/rendezvous/worker_environment.h"
#include "phalanx/launch/supervisor/supervisor.h"
#include "phalanx/launch/supervisor/visible_gpus.h"

namespace phalanx {

std::optional<int> spawn_local_ranks(int ranks, int argc, char** argv) {
  if (ranks < 1) throw ConfigError(fmt::format("spawn_local_ranks: {} ranks: expected at least 1", ranks));
  const WorkerEnvironment environment = read_worker_environment();
  // A single task of srun or mpirun may start its own ranks.
  if (environment.world_size > 1 || env_string("RANK")) return std::nullopt;
  SupervisorOptions options;
  options.command = {std::filesystem::read_symlink("/proc/self/exe").string()};
  if (argc > 1) options.command.insert(options.command.end(), argv + 1, argv + argc);
  options.ranks = ranks;
  const SupervisorResult result = supervise(options);
  if (!result.error.empty()) fmt::print(stderr, "{}\n", result.error);
  return result.exit_status;
}

int ranks_for_devices(const std::filesystem::path& root) {
  const int gpus = count_visible_gpus(current_environment(), root);
  return gpus > 0 ? gpus : usable_cores();
}

}  // namespace phalanx
