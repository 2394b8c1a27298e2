// StartupMonitor: notices that a rank has died, has ended or is stopped while the ranks still meet and make their world.
// From then on the world's communicator does. Torch-free.
//
// - While ranks are still to come, those of this machine are looked at: the ones that have come, and under our
//   launcher, which notes their processes beside the ranks' reports, those that have not.
// - When all have come, they also send each other signs of life (heartbeat_monitor.h), so that other machines are heard of. A
//   thread looks, and interrupts the store that the world is made through: whoever waits there throws a CommError, and
//   failure_reason() says why.
// - A rank that goes without started() is told to the others at once, by the store.
//
//   StartupMonitor startup_monitor(keys, {.rank = 1, .world_size = 4, .host_id = local_host_id(), .heartbeat = limit});
//   while (!all_are_there()) if (auto why = watch.failure_in_rendezvous(); !why.empty()) ...
//   watch.all_came(store, identities);
//   try { make_world(); } catch (const CommError&) { if (!watch.failure_reason().empty()) ...; throw; }
//   watch.started();
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
    std::string host_id;  // the same for the ranks of this machine alone
    std::chrono::milliseconds heartbeat = kDefaultHeartbeat;
  };
  /// The key by which the store tells of a rank that has gone.
  static constexpr const char* kGone = "gone_in_start";

  StartupMonitor(const std::shared_ptr<Store>& keys, Options options);
  ~StartupMonitor();
  StartupMonitor(const StartupMonitor&) = delete;
  StartupMonitor& operator=(const StartupMonitor&) = delete;

  /// To be asked every 200 ms or so while ranks are still to come. Empty while nothing is known to be wrong.
  std::string failure_in_rendezvous();
  /// identities: ProcessProbe::identity() of each rank. `store` is what trouble interrupts.
  void all_came(std::shared_ptr<Store> store, const std::vector<std::string>& identities);
  std::string failure_reason() const;
  void started();

 private:
  void run();
  std::string look();
  void stop_thread() noexcept;
  void find_local_processes();

  const Options options_;
  const std::shared_ptr<Store> keys_;  // a client of its own, which the store loses with this rank
  std::map<int, std::unique_ptr<ProcessProbe>> local_processes_;
  std::int64_t heard_ = 0;  // of those on this machine that have come
  std::shared_ptr<Store> store_;
  std::unique_ptr<HeartbeatMonitor> heartbeat_monitor_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false, has_started_ = false;
  std::string failure_reason_;
  std::thread thread_;
};

}  // namespace phalanx
