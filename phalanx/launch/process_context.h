// init_from_environment(): what a rank's main() begins with. Finds the other ranks and gives the world communicator.
//
// - The same program runs as a single process, under `phalanx launch`, torchrun (--no-python), srun and mpirun, and by
//   hand; see worker_environment.h, and spawn.h for one that starts its own ranks. What is missing or wrong is a
//   ConfigError; ranks that do not come, come twice, or disagree on the world size or on the versions of Phalanx and
//   libtorch are a CommError that names them and the address, on every rank. Who may join: rank_rendezvous.h.
// - backend "auto": shm where all ranks share a machine, gloo where none do, and shm+gloo otherwise (hierarchical.h);
//   which do is proved (node_discovery.h). "shm", "gloo" and "mpi" insist, on one level; "shm+gloo" and "shm+mpi" say
//   what goes between machines, and are shm where there is one. A single process uses the local backend. Rank 0 logs
//   the launcher, who may join, device, backend and rendezvous.
// - device "auto": cuda:LOCAL_RANK where libtorch has CUDA and this machine a GPU, else cpu.
// - On a GPU, "auto" is nccl (with a warning, host memory, where a rank cannot load NCCL) beside what the ranks would
//   use without; "nccl" insists; "nccl+gloo" and "nccl+mpi" use it inside a machine only (nccl_hierarchical.h); any other
//   backend moves CUDA tensors by way of host memory (device_communicator.h).
// - Large CPU tensors that are made from here on lie where the ranks of one machine reach them without copies
//   (comm/backends/local_shm/shared_tensors.h) if InitOptions::shared_heap or else PHALANX_SHARED_HEAP=1 says so.
// - The flight recorder (comm/flight_log.h) is written to the first of these that there is:
//   CommunicatorOptions::trace_folder, PHALANX_COMM_TRACE_DIR, the launcher's folder, one under $TMPDIR whose name the
//   ranks agree on.
// - Collective; the context outlives whatever uses its communicators. When it goes, the rank that hosts the store waits
//   a few seconds for the others to be done with it.
//
//   ProcessContext context = init_from_environment();
//   DistributedDataParallel ddp(model, context.world);
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <string>

#include "phalanx/comm/communicator.h"
#include "phalanx/store/store.h"

namespace phalanx {

struct InitOptions {
  std::string backend = "auto";  // or shm, gloo, mpi, shm+gloo, shm+mpi, nccl, nccl+gloo, nccl+mpi, local (one process)
  std::string device = "auto";   // auto, cpu, cuda
  std::string method = "env://";     // or tcp://HOST:PORT, file:///PATH; see init_method.h
  int rank = -1;                     // of tcp:// and file://, where neither the method nor the environment says
  int world_size = -1;               // likewise
  std::optional<bool> shared_heap;   // nothing: as $PHALANX_SHARED_HEAP says, else no
  CommunicatorOptions communicator;  // its first_timeout bounds the rendezvous too
};

struct ProcessContext {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  c10::Device device{c10::DeviceType::CPU};
  std::shared_ptr<void> host;  // on the rank that hosts the store: the server, let go last
  std::shared_ptr<Store> store;
  std::shared_ptr<Communicator> world;
};

ProcessContext init_from_environment(InitOptions options = {});

}  // namespace phalanx
