// Open MPI's own blocking calls, as a program would make them: the baseline for the shm and the mpi backend.
#pragma once

#include "phalanx/measure/collectives/comm_bench_call.h"

namespace phalanx::benchmarks {

/// "openmpi": every collective, with float32, float64, int32, int64 and uint8. MPI is initialised when the first call
/// is prepared, for one thread, unless it already is. A build without MPI reports that for every case.
measure::BenchBaseline open_mpi_baseline();

}  // namespace phalanx::benchmarks
