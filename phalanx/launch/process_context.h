// init_from_environment(): what a rank's main() begins with. Finds the other ranks and gives the world communicator.
//
// - The same program runs as a single process, under `phalanx launch`, under torchrun (--no-python) and by hand; see
//   worker_environment.h. What is missing or wrong is a ConfigError; ranks that do not come, come twice, or disagree on
//   the world size are a CommError that names them and the address.
// - backend "auto": shm where all ranks share a machine, gloo otherwise; "shm" and "gloo" insist. A single process uses
//   the local backend. Rank 0 logs device, backend and rendezvous.
// - device "auto": cuda:LOCAL_RANK where libtorch has CUDA and this machine a GPU, else cpu.
// - Collective; the context outlives whatever uses its communicators. When it goes, the rank that hosts the store waits
//   a few seconds for the others to be done with it.
//
//   ProcessContext context = init_from_environment();
//   DistributedDataParallel ddp(model, context.world);
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "phalanx/comm/communicator.h"
#include "phalanx/comm/store.h"

namespace phalanx {

struct InitOptions {
  std::string backend = "auto";      // auto, shm, gloo, local (a single process only)
  std::string device = "auto";       // auto, cpu, cuda
  std::string method = "env://";     // or tcp://HOST:PORT, with rank and world_size: rank 0 hosts the store there
  int rank = -1;                     // tcp:// only
  int world_size = -1;               // tcp:// only
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
