// Init methods: how a rank is told who it is and where the others are, when not by a launcher alone. Torch-free.
//
//   env://                                        the environment says all (worker_environment.h)
//   tcp://HOST:PORT[?rank=R&world_size=W]         rank 0 hosts the store at this address of its machine
//   file:///PATH[?rank=R&world_size=W]            rank 0 writes its store's address into this file of a shared folder
//                                                 (rendezvous_file.h); a file left behind by a crash does no harm
//
// Rank and world size come from the method, from the caller (`rank`, `world_size`; -1: not given) or from the
// environment, so under srun or mpirun none need be given. Where two of them disagree, or none says, it is a
// ConfigError.
#pragma once

#include <string>

#include "phalanx/launch/rendezvous/worker_environment.h"

namespace phalanx {

WorkerEnvironment resolve_init_method(const std::string& method, int rank = -1, int world_size = -1,
                                      const EnvironmentLookup& lookup = {});

}  // namespace phalanx
