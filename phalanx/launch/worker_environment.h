// WorkerEnvironment: who this process is among its ranks, from the variables that launchers set. Torch-free.
//
//   phalanx launch    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PHALANX_STORE
//   torchrun          the same without PHALANX_STORE, with TORCHELASTIC_USE_AGENT_STORE, TORCHELASTIC_RUN_ID, ...
//   by hand           RANK WORLD_SIZE MASTER_ADDR MASTER_PORT, and LOCAL_RANK LOCAL_WORLD_SIZE (without these two all
//                     ranks are taken to be on one machine)
//   none of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, PHALANX_STORE: a single process, rank 0 of 1
//
// Everything that is missing or malformed is named in one ConfigError.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "phalanx/comm/tcp_store_socket.h"

namespace phalanx {

struct WorkerEnvironment {
  enum class Rendezvous {
    none,          // a single process
    launcher,      // the launcher hosts our store at `store`
    agent_store,   // torchrun's agent hosts a c10d store at master
    static_master  // rank 0 is to host our store at master
  };
  Rendezvous rendezvous = Rendezvous::none;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  HostPort master;
  HostPort store;
  std::string run_id;     // of torchrun's job; else empty
  int restart_count = 0;  // how many times torchrun has restarted the ranks
};

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads the process's environment, or what `lookup` says. Throws ConfigError.
WorkerEnvironment read_worker_environment(const EnvironmentLookup& lookup = {});

}  // namespace phalanx
