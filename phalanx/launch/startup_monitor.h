// StartupMonitor: detects a rank that dies, ends or is stopped (SIGSTOP) during the rendezvous and while the world
// communicator is created. After that the world communicator detects it. Torch-free.
//
// - During the rendezvous it checks the ranks of this node: the ranks that have joined, and under our launcher also the
//   ranks that have not. The launcher records the process ids of its ranks beside their reports. Of other nodes it
//   knows the stopped ranks that their launchers report (stopped_ranks.h).
// - After all_came() the ranks also send each other heartbeats (heartbeat_monitor.h), so failures on other nodes are
//   detected too. A thread checks them. On a failure it interrupts the store through which the world is created: a call
//   that waits there throws CommError, and failure_reason() gives the reason.
// - If a rank ends without started(), the store notifies the other ranks at once.
//
//   StartupMonitor monitor(keys, {.rank = 1, .world_size = 4, .host_id = local_host_id(), .heartbeat = limit});
//   while (!all_joined())
//     if (auto why = monitor.failure_in_rendezvous(); !why.empty()) throw CommError(why);
//   monitor.all_came(store, identities);
//   try {
//     make_world();
//   } catch (const CommError&) {
//     if (auto why = monitor.failure_reason(); !why.empty()) throw CommError(why);
//     throw;
//   }
//   monitor.started();
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/comm/liveness/heartbeat_monitor.h"
#include "phalanx/comm/liveness/process_probe.h"
#include "phalanx/store/store.h"

namespace phalanx {

class StartupMonitor {
 public:
  struct Options {
    int rank = 0;
    int world_size = 1;
    int store_rank = -1;  // as in HeartbeatMonitor
    std::string host_id;  // equal for the ranks of this node, and only for them
    std::chrono::milliseconds heartbeat = kDefaultHeartbeat;
  };
  /// The store sets this key when a rank ends before started().
  static constexpr const char* kGone = "gone_in_start";

  StartupMonitor(const std::shared_ptr<Store>& keys, Options options);
  ~StartupMonitor();
  StartupMonitor(const StartupMonitor&) = delete;
  StartupMonitor& operator=(const StartupMonitor&) = delete;

  /// Returns the reason why the rendezvous cannot succeed; empty while no failure is known. Call it about every 200 ms
  /// while ranks are missing.
  std::string failure_in_rendezvous();
  /// Call it when all ranks have joined. `identities` holds ProcessProbe::identity() of each rank. A failure interrupts
  /// `store`.
  void all_came(std::shared_ptr<Store> store, const std::vector<std::string>& identities);
  std::string failure_reason() const;
  void started();

 private:
  void run();
  std::string look();
  void stop_thread() noexcept;
  void find_local_processes();

  const Options options_;
  const std::shared_ptr<Store> keys_;  // a separate client; the store loses it when this rank dies
  std::map<int, std::unique_ptr<ProcessProbe>> local_processes_;
  std::int64_t heard_ = 0;  // ranks of this node that have joined and were read
  std::shared_ptr<Store> store_;
  std::unique_ptr<HeartbeatMonitor> heartbeat_monitor_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false, has_started_ = false;
  std::string failure_reason_;
  std::thread thread_;
};

}  // namespace phalanx
