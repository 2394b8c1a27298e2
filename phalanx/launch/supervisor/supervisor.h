// The supervisor behind `phalanx launch`: starts the ranks of this node, watches over them, restarts them, ends them;
// with others of its kind it makes one job of many nodes. Torch-free.
//
// - Ranks get torchrun's variables, PHALANX_STORE (a store made for each round), PHALANX_JOB_SECRET, PHALANX_REPORT_DIR
//   (worker_report.h), a folder for their flight recorders (trace_folders.h), and an environment prepared for their
//   number (environment_preparation.h).
// - Output goes where worker_logs.h says; a console that stands still holds up the ranks that write there, and nothing
//   else. The end waits until all is shown; after a signal to stop, 1 s. Rank 0 inherits a standard input that is no
//   terminal; the others have none.
// - The first rank that fails ends the others, on every node (SIGTERM, later SIGKILL). While restarts are left all
//   ranks start again in a new round; else the result tells of the root cause first (worker_failure.h).
// - The signals of `stop_signals` are passed on, to the ranks of the other nodes too (coordinator.h). Ranks that
//   announced a graceful stop get the time they asked for; others are killed 1.5 s after SIGINT (30 s after the rest).
//   A second signal kills at once, unless one of the two is SIGHUP or SIGXCPU; one that came by another node is none of
//   the two. SIGHUP that is ignored (nohup) stays ignored, for the ranks too. SIGUSR1, SIGUSR2 and SIGQUIT, where they
//   are none of `stop_signals`, are passed on and mean nothing to the launcher; SIGQUIT only to processes that handle
//   it.
// - Ranks, and what they started, end with the supervisor, even when it is killed by SIGKILL; only processes that left
//   their rank's process group do not.
//
// One call at a time in a process, from a thread that stays; the signals are taken for its duration.
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
  HostPort endpoint;                                // where nodes meet; not used by a job of one node
  std::optional<bool> is_host;                      // dynamic only; unset: whoever has the endpoint's address
  std::string bind_address;                         // of the host; empty: the endpoint's, "*": every interface
  std::string local_address;                        // by which the other nodes reach this one; empty: found out
  std::chrono::milliseconds join_timeout{600'000};  // for enough nodes to come
  std::chrono::milliseconds last_call{30'000};      // for more nodes, once enough have come
  std::chrono::milliseconds close_timeout{30'000};  // at the end, for the other nodes to hear of it
  std::chrono::milliseconds read_timeout{60'000};   // of one exchange while joining
  std::chrono::milliseconds keep_alive{2'000};      // how often a node gives a sign of life
  int missed_keep_alives = 3;                       // after so many it is lost
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
  int master_port = 0;              // for the ranks' MASTER_PORT; 0: a free one
  bool virtual_local_rank = false;  // LOCAL_RANK is 0 and CUDA_VISIBLE_DEVICES one GPU
  std::vector<int> stop_signals;    // empty: default_stop_signals()
  std::chrono::milliseconds interrupt_grace{1'500};
  std::chrono::milliseconds terminate_grace{30'000};
  std::chrono::milliseconds failure_grace{5'000};  // between SIGTERM and SIGKILL of the ranks that did not fail
  std::chrono::milliseconds stopped_grace{5'000};  // for a rank that is stopped (SIGSTOP) while others have ended
  std::chrono::milliseconds blame_grace{500};      // how long a CommError waits for the error that caused it
  std::chrono::milliseconds same_grace{500};       // how long another error waits for the same one of other ranks
};

struct SupervisorResult {
  int exit_status = 0;   // 0; 2 if the failing rank's was 2; 128 + signal; else 1
  int failed_rank = -1;  // the root cause's; -1 where it was none
  std::string error;     // the report for the user; empty on success and after a stop that was asked for
};

/// Throws UsageError if the program cannot be run, CommError if this node cannot take part in the job.
SupervisorResult supervise(const SupervisorOptions& options);

}  // namespace phalanx
