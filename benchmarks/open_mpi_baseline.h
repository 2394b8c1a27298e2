// Open MPI's own blocking calls, as a program would make them: the peer of the shm and the mpi backend.
#pragma once

#include "phalanx/measure/collectives/comm_bench_call.h"

namespace phalanx::benchmarks {

/// "openmpi": every verb, with float32, float64, int32, int64 and uint8. MPI is initialised when the first call is made
/// ready, for one thread, unless it has been. A build without MPI says so for every case.
measure::BenchBaseline open_mpi_baseline();

}  // namespace phalanx::benchmarks
