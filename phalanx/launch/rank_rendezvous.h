// How the ranks of a job come together: they reach one store, which rank 0 or the launcher hosts, and call the roll.
//
// - Everybody who may join knows the job's secret (job_secret.h) where there is one. Without a launcher that gives one,
//   rank 0 makes it and passes it on by a file of mode 0600, wherever such a file can be passed on; otherwise the store
//   lets in whoever reaches it, and if others than this machine can, that is a warning.
// - A rank that does not come, that comes twice, or that has another world size, or another version of Phalanx or
//   libtorch, is the same CommError on every rank, with the store's address. The first rank whose time is up speaks for
//   all.
// - So is a rank that dies meanwhile, and on one machine one that is stopped (startup_monitor.h).
// - The rank that hosts the store keeps it, when its RankRendezvous goes, until those who came are done with theirs (5 s at
//   most).
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
  std::shared_ptr<void> host;  // to be let go last
  std::shared_ptr<Store> store;
  HostPort server;                    // the store's address
  std::string secret_source;          // where the secret came from; empty: there is none
  std::vector<std::string> host_ids;  // of each rank: equal ones may share a machine (local_host_id(); not proved yet)
  int ranks_on_these_cpus = 1;        // those whose place and CPUs are this rank's, with it
  std::shared_ptr<StartupMonitor> startup_monitor;  // until the world is made
};

struct RankRendezvousOptions {
  std::chrono::milliseconds timeout{};
  std::chrono::milliseconds heartbeat = kDefaultHeartbeat;  // how long a rank may be stopped (process_probe.h)
  std::string backend = "auto";                             // the same on all ranks, or an error on all
};

/// For environments whose rendezvous is not `none`. Throws CommError and ConfigError.
RankRendezvous rendezvous_ranks(const WorkerEnvironment& environment, const RankRendezvousOptions& options);

}  // namespace phalanx
