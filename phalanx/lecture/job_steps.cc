#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <map>
#include <optional>

#include "phalanx/base/error.h"
#include "phalanx/launch/rendezvous/slurm_nodes.h"
#include "phalanx/launch/rendezvous/worker_environment.h"
#include "phalanx/lecture/flow.h"
#include "phalanx/lecture/steps.h"

namespace phalanx::lecture {
namespace {

using Variables = std::map<std::string, std::string>;

/// What a launcher on each of two nodes tells a rank.
Variables variables_of(int rank, int ranks, const std::string& first_node) {
  const int of_node = ranks > 1 ? ranks / 2 : 1;
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(ranks)},
          {"LOCAL_RANK", std::to_string(rank % of_node)},
          {"LOCAL_WORLD_SIZE", std::to_string(of_node)},
          {"MASTER_ADDR", first_node},
          {"MASTER_PORT", "29400"}};
}

/// What the rank makes of them. Throws an error that names what is missing.
WorkerEnvironment read(const Variables& variables) {
  return read_worker_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

}  // namespace

void read_environments(Stage& stage) {
  const int n = stage.ranks();
  const std::vector<std::string> nodes = expand_slurm_nodes("gpu[01-02]", "SLURM_JOB_NODELIST");
  Flow flow(n);
  stage.on_ranks(n, [&](Rank& rank) {
    Variables told = variables_of(rank.number(), n, nodes.front());
    const WorkerEnvironment mine = read(told);
    flow.add(rank, "node", nodes[static_cast<std::size_t>(mine.rank / mine.local_world_size)]);
    flow.add(rank, "RANK", std::to_string(mine.rank));
    flow.add(rank, "LOCAL_RANK", std::to_string(mine.local_rank));
    flow.add(rank, "device", fmt::format("cuda:{}", mine.local_rank));
    flow.add(rank, "meets at", mine.master.text());
    const at::Tensor sum = at::full({1}, mine.rank, rank.floats());
    rank.comm().all_reduce(sum);
    rank.check(mine.world_size == n && sum.item<double>() * 2 == n * (n - 1), "every number is there once");
    told.erase("WORLD_SIZE");
    std::string error;
    try {
      read(told);
    } catch (const ConfigError& missing) {
      error = missing.what();
    }
    rank.check(error.find("WORLD_SIZE") != std::string::npos, "a variable that is missing is named");
  });
  flow.show(stage, "two nodes: what each rank is told");
}

}  // namespace phalanx::lecture
