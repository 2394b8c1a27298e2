// HeartbeatMonitor: distinguishes a stopped rank from a slow one, and knows what each rank waits for. The ranks may be
// on different nodes. Torch-free.
//
// - Every rank has one key in the store, which only it writes, from a separate thread. The value holds a growing
//   counter and, for each group that the rank waits in, what it waits for. So a rank that computes for hours still has
//   a heartbeat. A rank whose process or node is stopped has none.
// - The other ranks read these keys only while they wait themselves: every 100 ms, less often in worlds of more than 30
//   ranks.
// - Processes of this node are observed directly (process_probe.h), so a thread that gets no CPU time causes no alarm
//   there. A process in another network namespace must send heartbeats, too.
// - Time in which the reader itself did not run does not count.
// - If no rank hosts the store, a rank that gets no answer from the store for the limit gives up, too: that rank is the
//   one that is cut off.
//
//   HeartbeatMonitor monitor(store, rank, identities, {});
//   monitor.wait_in("world", "collective 12");            // now and then, while waiting
//   if (auto why = monitor.failure_reason(2); !why.empty())
//     throw CommError("rank 2 " + why);                   // "is stopped (SIGSTOP): ...", "has given no sign of ..."
//   auto state = monitor.states("world")[2];              // what rank 2 last published that it waits for
//   monitor.leave("world");                               // no longer waiting
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/comm/liveness/process_probe.h"
#include "phalanx/store/store.h"

namespace phalanx {

class HeartbeatMonitor {
 public:
  struct Options {
    std::chrono::milliseconds heartbeat = kDefaultHeartbeat;  // the limit; 0: ranks may be silent for ever
    int store_rank = -1;  // the rank that hosts the store: a silent store means a silent rank. -1: none, or unknown
  };

  /// identities[r]: ProcessProbe::identity() of world rank r. All ranks in this class are world ranks.
  HeartbeatMonitor(const std::shared_ptr<Store>& store, int rank, const std::vector<std::string>& identities,
                   Options options);
  ~HeartbeatMonitor();  // returns at once, even if the store is silent
  HeartbeatMonitor(const HeartbeatMonitor&) = delete;
  HeartbeatMonitor& operator=(const HeartbeatMonitor&) = delete;

  void wait_in(const std::string& group, const std::string& state);
  void leave(const std::string& group);
  /// What each rank last published that it waits for in the group; empty: nothing.
  std::vector<std::string> states(const std::string& group) const;

  /// Why waiting for the rank is in vain: it has been stopped, or has sent no heartbeat, for nearly as long as the
  /// limit. Empty while the rank is well. Call it about every 100 ms while waiting.
  std::string failure_reason(int rank);
  /// True if the rank's process is observed to have ended. Only for ranks on this node.
  bool is_dead(int rank) const { return processes_.is_dead(rank); }
  /// The store has not answered for a while: better not to send it anything.
  bool is_store_silent() const;
  /// For how long the store has not answered; zero while it does.
  std::chrono::nanoseconds store_silence() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    std::string text;  // as read last
    std::chrono::nanoseconds silent{};
  };
  void run();
  bool publish();
  void poll_peers();
  void begin_call();
  void answered() { unanswered_since_.store(0, std::memory_order_relaxed); }
  std::chrono::nanoseconds certain_store_silence();

  const std::shared_ptr<Store> store_;  // a client of its own
  const int rank_, size_;
  const Options options_;
  ProcessProbe processes_;
  std::atomic<Clock::rep> unanswered_since_{0};  // when a request of this client has been open since; 0: none is
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool has_update_ = false;                   // must be published at once
  std::map<std::string, std::string> waits_;  // group -> what for
  std::vector<Peer> peers_;
  Clock::time_point polled_at_{};
  Clock::time_point silent_since_{}, silence_looked_at_{};  // of the store
  std::uint64_t beats_ = 0;                                 // used by the thread only
  std::thread thread_;
};

}  // namespace phalanx
