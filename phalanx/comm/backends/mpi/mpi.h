// The mpi backend: ranks started by mpirun or srun, over the Open MPI that was found when this was built.
//
// - The first communicator initialises MPI and requests MPI_THREAD_MULTIPLE. MPI is finalised when the process exits.
//   If the program has initialised MPI itself, the backend uses it as it is and never finalises it.
// - Before data moves, an all-gather of 32-byte signatures makes a mismatch an error on every rank. Data moves directly
//   from and to the caller's tensors.
// - Reductions by MPI itself, in its order: sum, product and avg in float32 and float64, and all of integers and bool.
//   Every rank gets the same bits, but another number of ranks or another Open MPI may give different ones.
// - Reductions by an all-to-all and our own kernels in rank order: 16-bit floats (accumulated in float32), min and max
//   of floats (NaN if any is NaN), and with `deterministic` everything. They give the bits of the local, shm and gloo
//   backends.
// - When a rank dies, the others name it within a second on standard error, with the operation that it left. Then they
//   end the job (MPI_Abort), as mpirun is about to do. A rank that is stopped, or whose node or network is down, is
//   found within CommunicatorOptions::heartbeat (heartbeat_monitor.h). If data is being moved at that time, or at a
//   time-out, the job is ended, too: MPI cannot give the tensors back, and they must not be freed under it. Everything
//   else is a CommError, as on the other backends.
// - After a failure MPI is not finalised, because stuck ranks would never reach MPI_Finalize. So mpirun ends the job
//   when the rank exits, whatever its status.
// - The store carries heartbeats, deaths and aborts, but no data.
//
//   auto world = make_mpi_communicator(store, rank, world_size);
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "phalanx/comm/communicator.h"
#include "phalanx/store/store.h"

namespace phalanx {

struct MpiOptions {
  bool deterministic = false;                   // all reductions in rank order
  std::int64_t largest_call = (1LL << 31) - 1;  // most elements that one MPI call moves; smaller in tests only
  int store_rank = -1;   // the rank that hosts the store, if one does: if the store dies, that rank has died
  std::string identity;  // of this process; empty: determined. Tests use it to make ranks of one node look separate
  CommunicatorOptions communicator;
};

/// REQUIRES: all ranks 0..world_size-1 call it, each with a client of the same store. The store outlives the
/// communicator and all that are split from it.
/// Throws ConfigError if MPI gave the process another rank or size, if the build or the node has no MPI, or if MPI does
/// not provide MPI_THREAD_MULTIPLE.
/// Throws CommError that names the ranks which do not arrive within communicator.first_timeout.
std::shared_ptr<Communicator> make_mpi_communicator(std::shared_ptr<Store> store, int rank, int world_size,
                                                    MpiOptions options = {});

/// "Open MPI v4.1.4"; nullopt if this build or this node has no MPI. Does not initialise MPI.
std::optional<std::string> mpi_library();

}  // namespace phalanx
