// Init methods: how a rank learns its rank and the address of the other ranks, as in torch.distributed. Torch-free.
//
//   env://                                        all comes from the environment (worker_environment.h)
//   tcp://HOST:PORT[?rank=R&world_size=W]         rank 0 hosts the store at this address of its node
//   file:///PATH[?rank=R&world_size=W]            rank 0 writes its store's address into this file in a shared folder
//                                                 (rendezvous_file.h); a file that a crash left behind does no harm
//
// Rank and world size come from the method, from the caller (`rank`, `world_size`; -1: not given) or from the
// environment. So they need not be given under srun or mpirun. It is a ConfigError if two of these sources disagree, or
// if none gives the value.
#pragma once

#include <string>

#include "phalanx/launch/rendezvous/worker_environment.h"

namespace phalanx {

WorkerEnvironment resolve_init_method(const std::string& method, int rank = -1, int world_size = -1,
                                      const EnvironmentLookup& lookup = {});

}  // namespace phalanx
