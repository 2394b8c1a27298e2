#include "phalanx/launch/rendezvous/worker_environment.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/launch/rendezvous/launcher_variables.h"
#include "phalanx/launch/rendezvous/variable_reader.h"

namespace phalanx {
namespace {

using Rendezvous = WorkerEnvironment::Rendezvous;

void check_ranges(VariableReader& reader, const WorkerEnvironment& environment, const char* rank_name,
                  const char* size_name) {
  if (!reader.all_good()) return;
  if (environment.rank >= environment.world_size)
    reader.complain(fmt::format("{} is {} and {} {} (ranks count from 0)", rank_name, environment.rank, size_name,
                                environment.world_size));
  if (environment.local_world_size < 0) return;
  if (environment.local_rank >= environment.local_world_size)
    reader.complain(fmt::format("the local rank is {} and the local world size {} (ranks count from 0)",
                                environment.local_rank, environment.local_world_size));
  if (environment.local_world_size > environment.world_size)
    reader.complain(fmt::format("the local world size is {} and the world size {}", environment.local_world_size,
                                environment.world_size));
}

// Reads RANK and WORLD_SIZE, which phalanx launch, torchrun or the user sets.
WorkerEnvironment read_torch_variables(VariableReader& reader) {
  WorkerEnvironment result;
  result.world_size = reader.required_integer("WORLD_SIZE", 1, kMaxWorldSize);
  result.rank = reader.required_integer("RANK", 0, kMaxWorldSize - 1);
  const auto local_rank = reader.integer("LOCAL_RANK", 0, kMaxWorldSize - 1);
  const auto local_world_size = reader.integer("LOCAL_WORLD_SIZE", 1, kMaxWorldSize);
  if (local_rank.has_value() != local_world_size.has_value())
    reader.complain(local_rank ? "LOCAL_RANK is set and LOCAL_WORLD_SIZE is not"
                               : "LOCAL_WORLD_SIZE is set and LOCAL_RANK is not");
  result.local_rank = local_rank.value_or(-1);
  result.local_world_size = local_world_size.value_or(-1);
  result.run_id = reader.text("TORCHELASTIC_RUN_ID").value_or("");
  result.restart_count = reader.integer("TORCHELASTIC_RESTART_COUNT", 0, 1 << 30).value_or(0);

  if (const auto store = reader.text("PHALANX_STORE")) {
    result.rendezvous = Rendezvous::launcher;
    result.launcher = "phalanx launch";
    try {
      result.store = parse_host_port(*store, "PHALANX_STORE");
    } catch (const ConfigError& error) {
      reader.complain(error.what());
    }
  } else {
    const std::string agent = reader.text("TORCHELASTIC_USE_AGENT_STORE").value_or("");
    const bool has_agent = agent == "True" || agent == "true" || agent == "1";
    result.rendezvous = has_agent ? Rendezvous::agent_store : Rendezvous::static_master;
    result.launcher = reader.has("TORCHELASTIC_RUN_ID") ? fmt::format("torchrun (run {})", result.run_id)
                                                        : "the variables RANK and WORLD_SIZE";
    if (result.world_size == 1) result.rendezvous = Rendezvous::none;
  }
  const bool meets_at_master =
      result.rendezvous == Rendezvous::agent_store || result.rendezvous == Rendezvous::static_master;
  if (meets_at_master) {
    result.master.host = reader.required_text("MASTER_ADDR");
    result.master.port = static_cast<std::uint16_t>(reader.required_integer("MASTER_PORT", 1, 65535));
  } else {
    result.master = {reader.text("MASTER_ADDR").value_or("127.0.0.1"),
                     static_cast<std::uint16_t>(reader.integer("MASTER_PORT", 1, 65535).value_or(0))};
  }
  check_ranges(reader, result, "RANK", "WORLD_SIZE");
  reader.throw_if_wrong(
      ". Start the program with `phalanx launch`, torchrun, srun or mpirun, or unset RANK, WORLD_SIZE, LOCAL_RANK and "
      "LOCAL_WORLD_SIZE to run a single process");
  return result;
}

// Completes the values of Open MPI, Slurm or PMI with the rendezvous.
WorkerEnvironment complete_launcher(VariableReader& reader, WorkerEnvironment result) {
  if (const auto world = reader.integer("WORLD_SIZE", 1, kMaxWorldSize); world && *world != result.world_size)
    reader.complain(
        fmt::format("WORLD_SIZE is {}, and {} started {} ranks", *world, result.launcher, result.world_size));
  const bool has_address = reader.has("MASTER_ADDR");
  const std::optional<int> port = reader.integer("MASTER_PORT", 1, 65535);  // checked for a single rank too
  if (result.world_size == 1) {
    result.rendezvous = Rendezvous::none;
  } else if (port) {
    result.rendezvous = Rendezvous::static_master;
    result.master.port = static_cast<std::uint16_t>(*port);
    const auto host = has_address ? reader.text("MASTER_ADDR") : first_slurm_host(reader);
    if (!host && reader.all_good()) reader.complain("MASTER_PORT is set and MASTER_ADDR is not");
    result.master.host = host.value_or("");
  } else if (has_address) {
    reader.complain("MASTER_ADDR is set and MASTER_PORT is not: set both, or neither");
  } else {
    result.rendezvous = Rendezvous::shared_file;
    if (result.file_name.empty() && reader.all_good())
      reader.complain(
          fmt::format("{} gives the job no name for the rendezvous of its ranks: set MASTER_ADDR and MASTER_PORT (the "
                      "node of rank 0 and a free port there), or use `phalanx launch` on each node",
                      result.launcher));
  }
  check_ranges(reader, result, "the rank", "the world size");
  reader.throw_if_wrong(fmt::format(". These variables were set by {}", result.launcher));
  return result;
}

}  // namespace

WorkerEnvironment read_worker_environment(const EnvironmentLookup& lookup_or_none) {
  const EnvironmentLookup lookup =
      lookup_or_none ? lookup_or_none : [](const std::string& name) { return env_string(name); };
  VariableReader reader(lookup);
  const auto any_of = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return reader.has(name); });
  };
  if (any_of({"RANK", "LOCAL_RANK", "PHALANX_STORE"})) return read_torch_variables(reader);
  if (auto found = read_launcher_variables(reader)) return complete_launcher(reader, std::move(*found));
  if (any_of({"WORLD_SIZE", "LOCAL_WORLD_SIZE"})) return read_torch_variables(reader);
  if (reader.has("PMIX_RANK") && reader.has("PMIX_NAMESPACE"))
    throw ConfigError(
        "PMIX_RANK is set, and no variable says how many ranks there are (PMIx tells it only to programs that link its "
        "library): set RANK and WORLD_SIZE, MASTER_ADDR and MASTER_PORT too, or unset PMIX_RANK to run a single "
        "process");
  reader.integer("MASTER_PORT", 1, 65535);
  reader.throw_if_wrong(". A single process needs none: unset it");
  WorkerEnvironment single;
  single.local_rank = 0;
  single.local_world_size = 1;
  return single;
}

}  // namespace phalanx
