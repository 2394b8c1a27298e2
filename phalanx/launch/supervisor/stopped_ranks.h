// StoppedRanks: in a job of several nodes, a launcher's word to the ranks of the other nodes about those of its own
// that stand still (SIGSTOP). Before a rank has come to the meeting nobody but its own launcher can see that.
// Torch-free.
//
// A thread looks twice a second. It asks nothing of the store, and does not connect, as long as all ranks run.
//
//   StoppedRanks watch(store, secret, {{4, pid_of_rank_4}});       // the launcher
//   auto said = read_stopped_rank(*keys);                          // a rank that waits, with the keys of the meeting
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "phalanx/store/store.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

class TcpStore;

class StoppedRanks {
 public:
  StoppedRanks(HostPort store, std::string secret, std::map<int, pid_t> processes);
  ~StoppedRanks();
  StoppedRanks(const StoppedRanks&) = delete;
  StoppedRanks& operator=(const StoppedRanks&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  void run();
  std::string look(Clock::time_point now);
  void publish(const std::string& text);

  const HostPort address_;
  const std::string secret_, host_;
  std::map<int, pid_t> processes_;
  std::map<int, Clock::time_point> since_;  // of ranks that stand still
  Clock::time_point looked_at_{};
  std::string told_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::shared_ptr<TcpStore> store_;
  std::thread thread_;
};

/// What a launcher has said last.
struct StoppedRank {
  int rank = -1, pid = 0;
  std::chrono::milliseconds stopped_for{};
  std::string host;
};
std::optional<StoppedRank> read_stopped_rank(Store& keys);

}  // namespace phalanx
