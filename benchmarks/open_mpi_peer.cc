#include "benchmarks/open_mpi_peer.h"

#include <stdexcept>

#ifdef PHALANX_HAVE_MPI
#include <mpi.h>

#include <cstdlib>
#endif

namespace phalanx::benchmarks {

#ifdef PHALANX_HAVE_MPI

namespace {

void start_mpi() {
  int is_initialised = 0;
  MPI_Initialized(&is_initialised);
  if (is_initialised != 0) return;
  MPI_Init(nullptr, nullptr);
  std::atexit([] { MPI_Finalize(); });
}

}  // namespace

std::function<void()> open_mpi_call(const std::string& verb, PeerBuffers b) {
  start_mpi();
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int count = static_cast<int>(b.count);
  const int share = count / ranks;
  if (verb == "all_reduce")
    return [=] { MPI_Allreduce(MPI_IN_PLACE, b.whole, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
  if (verb == "all_gather")
    return [=] { MPI_Allgather(b.part, share, MPI_FLOAT, b.whole, share, MPI_FLOAT, MPI_COMM_WORLD); };
  if (verb == "reduce_scatter")
    return [=] { MPI_Reduce_scatter_block(b.whole, b.part, share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
  if (verb == "broadcast") return [=] { MPI_Bcast(b.whole, count, MPI_FLOAT, 0, MPI_COMM_WORLD); };
  if (verb == "all_to_all")
    return [=] { MPI_Alltoall(b.whole, share, MPI_FLOAT, b.received, share, MPI_FLOAT, MPI_COMM_WORLD); };
  if (verb == "pingpong")
    return [=] {
      if (rank == 0) {
        MPI_Send(b.whole, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(b.whole, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      } else if (rank == 1) {
        MPI_Recv(b.whole, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(b.whole, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
      }
    };
  throw std::runtime_error("no such verb: " + verb);
}

#else

std::function<void()> open_mpi_call(const std::string&, PeerBuffers) {
  throw std::runtime_error("openmpi: this build has no MPI (Debian: libopenmpi-dev)");
}

#endif

}  // namespace phalanx::benchmarks
