// Rendezvous of the ranks of a job: they connect to one store, which rank 0 or the launcher hosts, and check that all
// ranks have joined.
//
// - Access: if the job has a secret (job_secret.h), a rank needs it to join. If no launcher gives one, rank 0 generates
//   a secret and passes it on in a file of mode 0600, where such a file can be passed on. Otherwise every process that
//   reaches the store may join; if the store can be reached from other nodes, a warning is logged.
// - Errors: all ranks throw the same CommError, with the store's address, if a rank does not join, joins twice, or has
//   another world size or another version of Phalanx or libtorch. The first rank that times out reports for all ranks.
// - They also throw if a rank dies during the rendezvous, or if a rank of the same node is stopped (SIGSTOP).
//   startup_monitor.h says what is detected of other nodes.
// - The rank that hosts the store keeps it alive in the destructor of its RankRendezvous, until the ranks that joined
//   no longer need it (5 s at most).
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/launch/rendezvous/worker_environment.h"
#include "phalanx/launch/startup_monitor.h"
#include "phalanx/store/store.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

struct RankRendezvous {
  std::shared_ptr<void> host;  // destroy it last
  std::shared_ptr<Store> store;
  HostPort server;                    // the store's address
  std::string secret_source;          // where the secret came from; empty: there is none
  std::vector<std::string> host_ids;  // one per rank; equal ids may share a node (local_host_id(); not proved yet)
  int ranks_on_these_cpus = 1;        // ranks with this rank's host id and CPU set, including this rank
  std::shared_ptr<StartupMonitor> startup_monitor;  // used until the world communicator exists
};

struct RankRendezvousOptions {
  std::chrono::milliseconds timeout{};
  std::chrono::milliseconds heartbeat = kDefaultHeartbeat;  // how long a rank may be stopped (process_probe.h)
  std::string backend = "auto";                             // must be the same on all ranks, else all ranks throw
};

/// REQUIRES: environment.rendezvous is not `none`.
/// Throws CommError and ConfigError.
RankRendezvous rendezvous_ranks(const WorkerEnvironment& environment, const RankRendezvousOptions& options);

}  // namespace phalanx
