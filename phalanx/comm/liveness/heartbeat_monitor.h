// HeartbeatMonitor: how ranks that may be on different machines tell a stopped rank from a slow one, and what each of them
// waits for. Torch-free.
//
// Every rank has one key in the store, which it alone writes, from a thread of its own: a count that grows (so a rank
// that computes for hours has a pulse, one whose process or machine stands still has none), and for each group that it
// waits in, what it waits for. The others read these keys only while they wait themselves: every 100 ms, more seldom in
// worlds of more than 30 ranks. The processes of this machine are looked at directly (process_probe.h), so there even
// a thread that gets no processor is no cause for alarm; but those of another network namespace must be heard of, too.
// Time in which the reader itself stood still does not count. Where no rank hosts the store, one that gets no answer
// from it for as long gives up too: it is the one that is cut off.
//
//   pulse.wait_in("world", "collective 12");            // now and then, while waiting
//   if (auto why = pulse.failure_reason(2); !why.empty()) ...  // "is stopped (SIGSTOP): ...", "has given no sign of life ..."
//   pulse.states("world")[2];                           // what rank 2 waits for, as it said last
//   pulse.leave("world");                               // no longer waiting
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
    std::chrono::milliseconds heartbeat = kDefaultHeartbeat;  // 0: ranks may be silent for ever
    int store_rank = -1;  // the rank whose process hosts the store; its silence is the store's. -1: none, or not known
  };

  /// identities: of all ranks of the world (ProcessProbe::identity()). Ranks are those of the world everywhere here.
  HeartbeatMonitor(const std::shared_ptr<Store>& store, int rank, const std::vector<std::string>& identities,
                   Options options);
  ~HeartbeatMonitor();  // at once, though the store may be silent
  HeartbeatMonitor(const HeartbeatMonitor&) = delete;
  HeartbeatMonitor& operator=(const HeartbeatMonitor&) = delete;

  void wait_in(const std::string& group, const std::string& state);
  void leave(const std::string& group);
  /// What each rank last said that it waits for in the group; empty: nothing.
  std::vector<std::string> states(const std::string& group) const;

  /// Why the rank is not to be waited for any more: it has been stopped, or without a sign of life, for nearly as long
  /// as the limit. Empty while it is well. To be asked every 100 ms or so while waiting.
  std::string failure_reason(int rank);
  /// Whether the rank's process is seen to have ended. Only of ranks on this machine.
  bool is_dead(int rank) const { return processes_.is_dead(rank); }
  /// The store has not answered for a while: better not ask it anything.
  bool is_store_silent() const;
  /// For how long it has not; zero while it does.
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

  const std::shared_ptr<Store> store_;  // the pulse's own client
  const int rank_, size_;
  const Options options_;
  ProcessProbe processes_;
  std::atomic<Clock::rep> unanswered_since_{0};  // the pulse's own questions to the store; 0: all are answered
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool has_update_ = false;                   // to be told at once
  std::map<std::string, std::string> waits_;  // group -> what for
  std::vector<Peer> peers_;
  Clock::time_point polled_at_{};
  Clock::time_point silent_since_{}, silence_looked_at_{};  // of the store
  std::uint64_t beats_ = 0;                                 // the thread's own
  std::thread thread_;
};

}  // namespace phalanx
