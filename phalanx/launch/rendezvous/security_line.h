// security_line(): one log line of rank 0 about what protects the job, so the user knows who else could join.
// Torch-free.
#pragma once

#include <string>

#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

struct JobGuards {
  HostPort store;
  std::string secret_source;  // where the job's secret came from; empty: there is none
  std::string backend;        // of the world: "gloo", "shm+mpi", "nccl"
  std::string host_backend;   // the world's backend for signatures and CPU tensors: what it would be without GPUs
};

/// "security: the store at ...; shared memory is this user's only; gloo's data sockets let in only the job's ranks;
/// NCCL's data sockets take whoever reaches them; nothing is encrypted"
std::string security_line(const JobGuards& guards);

}  // namespace phalanx
