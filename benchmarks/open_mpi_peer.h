// Open MPI's own blocking calls, as a program would make them: the peer of the shm and the mpi backend.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace phalanx::benchmarks {

/// The buffers of one rank: float32.
struct PeerBuffers {
  float* whole = nullptr;  // `count` elements
  float* part = nullptr;   // count / ranks
  float* received = nullptr;
  std::int64_t count = 0;
};

/// Does the verb once. MPI is initialised at the first call, for one thread, unless it has been. Throws
/// std::runtime_error for a build without MPI.
std::function<void()> open_mpi_call(const std::string& verb, PeerBuffers buffers);

}  // namespace phalanx::benchmarks
