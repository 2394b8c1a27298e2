// What guards a job, in one line that rank 0 logs: whoever starts it should know who else could join. Torch-free.
#pragma once

#include <string>

#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

struct JobGuards {
  HostPort store;
  std::string secret_source;  // where the job's secret came from; empty: there is none
  std::string backend;        // of the world: "gloo", "shm+mpi", "nccl"
  std::string host_backend;   // what the world would be without GPUs, which stays beside it: signatures, CPU tensors
};

/// "security: the store at ...; shared memory is this user's only; NCCL's and gloo's data sockets take whoever reaches
/// them; nothing is encrypted"
std::string security_line(const JobGuards& guards);

}  // namespace phalanx
