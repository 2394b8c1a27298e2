// Who is in MPI, for tests: the calls that move operations on are counted on their way, by MPI's profiling interface
// (each MPI_X is also there as PMPI_X, so that a program may put a function of its own in front). Not counted are those
// that make a communicator, which have a thread of their own.
#pragma once

#include <cstdint>

namespace phalanx {

struct MpiCalls {
  std::int64_t calls = 0;
  int threads = 0;       // that have made one
  int most_at_once = 0;  // threads in a call at the same time
};

/// Of this process so far.
MpiCalls mpi_calls();

}  // namespace phalanx
