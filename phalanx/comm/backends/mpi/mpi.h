// The mpi backend: ranks that mpirun or srun started, over the Open MPI that was found when this was built.
//
// - MPI is initialised at the first communicator, asking for MPI_THREAD_MULTIPLE, and finalised when the process exits.
//   A program that has initialised MPI itself keeps it: it is used as it is and never finalised.
// - Before data moves an all-gather of 32-byte signatures makes a mismatch an error on every rank. Data go straight
//   from and to the caller's tensors.
// - Reductions: sum, product and avg in float32 and float64, and all of integers and bool, are MPI's own, in its order:
//   every rank gets the same bits, but another number of ranks or another Open MPI may give others. 16-bit floats
//   (accumulated in float32), min and max of floats (NaN if any is NaN), and with `deterministic` everything, are an
//   all-to-all and our own kernels in rank order: the bits of the local, shm and gloo backends.
// - A rank that dies is named by the others within a second, on standard error, with the operation that it left; then
//   they end the job (MPI_Abort), as mpirun is about to do. One that is stopped, or whose machine or network is down,
//   is found within CommunicatorOptions::heartbeat (heartbeat_monitor.h). If data are being moved then, or at a time-out, the
//   job is ended likewise: MPI cannot give the tensors back, and they are not freed under it. Everything else is a
//   CommError as on the other backends.
// - After a failure MPI is not finalised, for stuck ranks would never come to that; so mpirun ends the job when the
//   rank exits, whatever its status.
// - The store carries signs of life, deaths and aborts, no data. It must outlive the communicator and all that are
//   split from it.
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
  std::int64_t largest_call = (1LL << 31) - 1;  // elements that one call of MPI moves at most; less in tests only
  int store_rank = -1;   // the rank whose process hosts the store, if one does: when the store dies, so has that rank
  std::string identity;  // of this process; empty: found out. Tests make ranks of one machine strangers with it
  CommunicatorOptions communicator;
};

/// Collective over the ranks 0..world_size-1, each with a client of the same store; MPI must have given the process the
/// same rank and size, else a ConfigError. Also a ConfigError: a build or a machine without MPI, an MPI without
/// threads. Ranks that do not come within communicator.first_timeout are named in a CommError.
std::shared_ptr<Communicator> make_mpi_communicator(std::shared_ptr<Store> store, int rank, int world_size,
                                                    MpiOptions options = {});

/// "Open MPI v4.1.4"; nothing if this build or this machine has no MPI. Does not initialise it.
std::optional<std::string> mpi_library();

}  // namespace phalanx
