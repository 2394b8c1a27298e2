// The variables of launchers that do not know torch: Open MPI, Slurm, PMI. Used only by worker_environment.cc.
#pragma once

#include <optional>

#include "phalanx/launch/rendezvous/variable_reader.h"
#include "phalanx/launch/rendezvous/worker_environment.h"

namespace phalanx {

/// The rank of this process and its rendezvous file; nullopt if none of these launchers started it. `reader` collects
/// what is wrong.
std::optional<WorkerEnvironment> read_launcher_variables(VariableReader& reader);

/// The first node of Slurm's node list, if there is a list.
std::optional<std::string> first_slurm_host(VariableReader& reader);

/// The pid and start time of the nearest ancestor process with that name; without one, of the parent. The result is the
/// same for all ranks of a node, and no later job gets it again.
std::string ancestor_identity(const std::string& name);

}  // namespace phalanx
