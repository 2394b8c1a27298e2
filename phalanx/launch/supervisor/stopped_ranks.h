// StoppedRanks: in a job of several nodes, a launcher reports to the ranks of the other nodes which of its own ranks
// are stopped (SIGSTOP). Before a rank has joined the rendezvous, only its own launcher can see this. Torch-free.
//
// A thread checks twice a second. As long as all ranks run it does not connect to the store.
//
//   StoppedRanks watch(store, secret, {{4, pid_of_rank_4}});   // in the launcher
//   auto stopped = read_stopped_rank(*keys);                   // in a waiting rank, with the keys of the rendezvous
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
  std::map<int, Clock::time_point> since_;  // when each stopped rank was first seen stopped
  Clock::time_point looked_at_{};
  std::string told_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::shared_ptr<TcpStore> store_;
  std::thread thread_;
};

/// The last report of a launcher.
struct StoppedRank {
  int rank = -1, pid = 0;
  std::chrono::milliseconds stopped_for{};
  std::string host;
};
std::optional<StoppedRank> read_stopped_rank(Store& keys);

}  // namespace phalanx
