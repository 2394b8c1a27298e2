// init_from_environment(): the first call in a rank's main(). It finds the other ranks and returns the world
// communicator.
//
// - Launchers: the same program runs as a single process, under `phalanx launch`, torchrun (--no-python), srun and
//   mpirun, and with variables set by hand (worker_environment.h). A program that starts its own ranks uses spawn.h.
// - Errors: a missing or wrong variable is a ConfigError. It is a CommError if a rank does not join, joins twice, or
//   has another world size or another version of Phalanx or libtorch. The CommError is thrown on every rank, and it
//   names the ranks and the address. rank_rendezvous.h says who may join.
// - Backend "auto": shm if all ranks share one node, gloo if no two ranks do, otherwise shm+gloo (hierarchical.h).
//   node_discovery.h proves which ranks share a node. "shm", "gloo" and "mpi" force that backend, on one level.
//   "shm+gloo" and "shm+mpi" name the inter-node backend; on a single node they are shm. A single process uses the
//   local backend. Rank 0 logs the launcher, who may join, the device, the backend and the rendezvous address.
// - Device "auto": cuda:LOCAL_RANK if libtorch has CUDA and this node has a GPU, otherwise cpu.
// - Backends on a GPU: "auto" is nccl for CUDA tensors, beside the host backend that the ranks would use without a GPU.
//   If a rank cannot load NCCL, CUDA tensors go through host memory, with a warning. "nccl" forces NCCL. "nccl+gloo"
//   and "nccl+mpi" use NCCL for intra-node traffic only (hierarchical.h). Any other backend moves CUDA tensors
//   through host memory (device_communicator.h).
// - Shared heap: large CPU tensors that are created after this call can be placed in memory that the ranks of one node
//   read without copies (comm/backends/local_shm/shared_tensors.h). InitOptions::shared_heap switches this on; if it is
//   unset, PHALANX_SHARED_HEAP=1 does.
// - Flight recorder (comm/flight_log.h): its files go to the first of these that is set:
//   CommunicatorOptions::trace_folder, PHALANX_COMM_TRACE_DIR, the launcher's folder. Otherwise they go to a folder
//   under $TMPDIR; the ranks agree on its name.
//
//   ProcessContext context = init_from_environment();
//   DistributedDataParallel ddp(*model, context.world);
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
  std::string method = "env://";  // or tcp://HOST:PORT, file:///PATH; see init_method.h
  int rank = -1;                  // for tcp:// and file://, if neither the method nor the environment gives it
  int world_size = -1;            // likewise
  // CUDA loads all kernels at the start, not each at its first use: CUDA_MODULE_LOADING becomes EAGER. Loading
  // waits until no kernel runs. In a pipeline over NCCL that can be for ever: a running message may wait for a
  // rank that waits for this one. Costs some seconds and some hundred MiB of each GPU. No effect if the
  // process has used CUDA before.
  bool loads_kernels_at_start = false;
  std::optional<bool> shared_heap;   // unset: the value of $PHALANX_SHARED_HEAP, otherwise false
  CommunicatorOptions communicator;  // its first_timeout is also the limit for the rendezvous
};

struct ProcessContext {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  c10::Device device{c10::DeviceType::CPU};
  std::shared_ptr<void> host;  // on the rank that hosts the store: the server; destroyed last
  std::shared_ptr<Store> store;
  std::shared_ptr<Communicator> world;
};

/// Finds the other ranks and creates the world communicator. On the rank that hosts the store, the destruction of the
/// context waits a few seconds until the other ranks no longer need the store.
/// REQUIRES: every rank calls it (it is collective). The context outlives everything that uses its communicators.
ProcessContext init_from_environment(InitOptions options = {});

}  // namespace phalanx
