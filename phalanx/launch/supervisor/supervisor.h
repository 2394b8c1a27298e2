// The supervisor behind `phalanx launch`: it starts, watches, restarts and ends the ranks of this node. With
// supervisors on other nodes it forms one job of many nodes. Torch-free.
//
// - Environment: ranks get torchrun's variables, PHALANX_STORE (a new store for each round), PHALANX_JOB_SECRET,
//   PHALANX_REPORT_DIR (worker_report.h), a folder for their flight recorders (trace_folders.h), and an environment
//   prepared for the number of ranks (environment_preparation.h).
// - Output: worker_logs.h says where it goes. A blocked console blocks only the ranks that write there. At the end the
//   supervisor waits until all output is shown; after a stop signal it waits 1 s. Rank 0 inherits standard input if
//   that is not a terminal; the other ranks have none.
// - Failures: the first rank that fails ends the other ranks on every node (SIGTERM, later SIGKILL). While restarts are
//   left, all ranks start again in a new round. Otherwise the result reports the root cause first (worker_failure.h).
// - Stop signals: `stop_signals` are passed on to the ranks, also to those of the other nodes (coordinator.h). Ranks
//   that announced a graceful stop get the time that they asked for. Other ranks are killed 1.5 s after SIGINT, and 30
//   s after another signal. A second signal kills at once, unless one of the two is SIGHUP or SIGXCPU; a signal that
//   came through another node does not count. A SIGHUP that is ignored (nohup) stays ignored, for the ranks too.
// - Other signals: SIGUSR1, SIGUSR2 and SIGQUIT are passed on if they are not among `stop_signals`, and do not affect
//   the launcher. SIGQUIT goes only to processes that handle it.
// - Cleanup: the ranks and their children end with the supervisor, even if SIGKILL kills it. Only processes that left
//   the process group of their rank survive.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/launch/supervisor/cpu_binding.h"
#include "phalanx/launch/supervisor/environment_preparation.h"
#include "phalanx/launch/supervisor/worker_logs.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

/// How the nodes of a job find each other.
struct NodesOptions {
  int min_nodes = 1;
  int max_nodes = 1;
  bool fixed_node_ranks = false;                    // the static rendezvous: node_rank 0 hosts it
  int node_rank = 0;                                // static only
  HostPort endpoint;                                // address of the rendezvous; not used by a job of one node
  std::optional<bool> is_host;                      // dynamic only; unset: the node that has the endpoint's address
  std::string bind_address;                         // of the host; empty: the endpoint's, "*": every interface
  std::string local_address;                        // address of this node for the others; empty: detected
  std::chrono::milliseconds join_timeout{600'000};  // until enough nodes have joined
  std::chrono::milliseconds last_call{30'000};      // for more nodes, after enough have joined
  std::chrono::milliseconds close_timeout{30'000};  // at the end, until the other nodes know that the job has ended
  std::chrono::milliseconds read_timeout{60'000};   // of one exchange while joining
  std::chrono::milliseconds keep_alive{2'000};      // interval of a node's heartbeats
  int missed_keep_alives = 3;                       // a node is lost after this many missing heartbeats
};

struct SupervisorOptions {
  std::vector<std::string> command;  // program and arguments; ${local_rank} in an argument is replaced
  int ranks = 1;                     // on this node
  EnvironmentMap environment = current_environment();
  NodesOptions nodes;
  WorkerLogOptions logs;
  CpuBindingOptions binding;
  std::string run_id = "none";
  std::string role = "default";
  int max_restarts = 0;
  int master_port = 0;              // the ranks' MASTER_PORT; 0: a free port
  bool virtual_local_rank = false;  // each rank has LOCAL_RANK 0 and one GPU in CUDA_VISIBLE_DEVICES
  std::vector<int> stop_signals;    // empty: default_stop_signals()
  std::chrono::milliseconds interrupt_grace{1'500};
  std::chrono::milliseconds terminate_grace{30'000};
  std::chrono::milliseconds failure_grace{5'000};  // between SIGTERM and SIGKILL for the ranks that did not fail
  std::chrono::milliseconds stopped_grace{5'000};  // for a rank that is stopped (SIGSTOP) after others have ended
  std::chrono::milliseconds blame_grace{500};      // wait after a CommError for the error that caused it
  std::chrono::milliseconds same_grace{500};       // wait after another error for the same error of other ranks
};

struct SupervisorResult {
  int exit_status = 0;   // 0; 2 if the failing rank's was 2; 128 + signal; else 1
  int failed_rank = -1;  // the rank of the root cause; -1 if there is none
  std::string error;     // the report for the user; empty on success and after a requested stop
};

/// Runs the job and returns its result. Throws UsageError if the program cannot be run, and CommError if this node
/// cannot take part in the job. It handles the stop signals for the duration of the call.
/// REQUIRES: only one call runs at a time in a process. The calling thread lives until the call returns.
SupervisorResult supervise(const SupervisorOptions& options);

}  // namespace phalanx
