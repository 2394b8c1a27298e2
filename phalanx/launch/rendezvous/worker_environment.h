// WorkerEnvironment: this process's rank, world size and rendezvous, from the variables that launchers set. Torch-free.
//
// The first source of this list that applies is taken. So if one launcher starts another, the inner one counts:
//
//   phalanx launch    PHALANX_STORE, with RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
//   torchrun          RANK WORLD_SIZE ... with TORCHELASTIC_RUN_ID
//   by hand           RANK WORLD_SIZE MASTER_ADDR MASTER_PORT, and LOCAL_RANK LOCAL_WORLD_SIZE (without these two the
//                     ranks count themselves, node by node)
//   Open MPI          OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
//   Slurm             SLURM_PROCID SLURM_LOCALID SLURM_STEP_ID SLURM_STEP_NUM_TASKS: a task of srun. The batch script
//                     itself has no step, and is a single process
//   PMI               PMI_RANK PMI_SIZE (MPICH, Intel MPI, Cray), if the Slurm variables do not apply
//   none of these     a single process, rank 0 of 1
//
// Under Open MPI, Slurm and PMI the rendezvous uses a file of mode 0600 (rendezvous_file.h). If MASTER_ADDR and
// MASTER_PORT are both set, it uses that address instead. With MASTER_PORT alone Slurm's first node is the master.
// The file's folder is PHALANX_RENDEZVOUS_DIR if set. Otherwise, on a single node, it is this user's private folder
// under /tmp. Otherwise it is the folder that the job was submitted from (Slurm), or the current folder.
//
// One ConfigError names everything that is missing, malformed or contradictory.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

struct WorkerEnvironment {
  enum class Rendezvous {
    none,           // a single process
    launcher,       // the launcher hosts our store at `store`
    agent_store,    // torchrun's agent hosts a c10d store at `master`, which passes on our store's address
    static_master,  // rank 0 hosts our store at `master`
    shared_file     // rank 0 hosts our store; its address is in the file `file_name` in `file_folder`
  };
  Rendezvous rendezvous = Rendezvous::none;
  std::string launcher;  // "Slurm (job 12, step 0)"; empty: none
  int rank = 0;
  int world_size = 1;
  int local_rank = -1;  // -1: not given
  int local_world_size = -1;
  HostPort master;
  HostPort store;
  std::string file_folder;  // empty: private_temp_folder()
  std::string file_name;
  std::string run_id;     // torchrun's run id; otherwise empty
  int restart_count = 0;  // how many times torchrun has restarted the ranks

  /// True only if the launcher said that all ranks are on this node.
  bool on_one_node() const { return local_world_size == world_size; }
};

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads the variables through `lookup`; without one, from the process's environment. Throws ConfigError.
WorkerEnvironment read_worker_environment(const EnvironmentLookup& lookup = {});

}  // namespace phalanx
