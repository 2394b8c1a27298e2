// The variables of launchers that know nothing of torch: Open MPI, Slurm, PMI. Used by worker_environment.cc only.
#pragma once

#include <optional>

#include "phalanx/launch/rendezvous/variable_reader.h"
#include "phalanx/launch/rendezvous/worker_environment.h"

namespace phalanx {

/// Who this process is, and the file by which its ranks meet, if one of these launchers started it. What is wrong is
/// left with the reader.
std::optional<WorkerEnvironment> read_launcher_variables(VariableReader& reader);

/// The first node of Slurm's list, where there is one.
std::optional<std::string> first_slurm_host(VariableReader& reader);

/// The number of the nearest process above this one with that name, and when it was started: the same for all ranks of
/// a node, and never the same again. Falls back to the parent.
std::string ancestor_identity(const std::string& name);

}  // namespace phalanx
