// CoordinatorService: runs the coordinator on the node that hosts the rendezvous store. It reads the members' messages
// from the store, writes orders, and detects members without heartbeats. node_membership.h lists the keys. Torch-free.
//
// An error that it cannot recover from, such as a message that it does not understand, ends the job with an order that
// gives the reason. If a node's very first message is not understood (it may run another version of Phalanx), only that
// node is refused.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/launch/supervisor/coordinator.h"
#include "phalanx/store/store.h"

namespace phalanx {

class CoordinatorService {
 public:
  struct KeepAlive {
    std::chrono::milliseconds interval{5'000};
    int missed = 3;
  };
  using Broken = std::function<void(const std::string& reason)>;
  /// Starts a thread that uses the store; the destructor ends it. That thread calls `broken` when it can no longer
  /// write to the store, since no order can report this.
  CoordinatorService(std::shared_ptr<Store> store, CoordinatorOptions options, KeepAlive keep_alive, Broken broken);
  ~CoordinatorService();
  CoordinatorService(const CoordinatorService&) = delete;
  CoordinatorService& operator=(const CoordinatorService&) = delete;

  /// If the job has ended, waits until every member has left, for at most `limit`. Otherwise returns at once.
  void wait_for_departures(std::chrono::milliseconds limit);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

namespace rendezvous_keys {
std::string message(int member, int index);
std::string order(int index);
std::string beat(int member);
std::string lost(int member);
std::string leave(int member);
extern const char* const kMembers;  // how many nodes have joined; a hint only
}  // namespace rendezvous_keys

/// The first of the keys that exists; nullopt after the timeout. Throws CommError if the store does not answer.
std::optional<std::string> wait_for_any(Store& store, const std::vector<std::string>& keys,
                                        std::chrono::milliseconds timeout);

}  // namespace phalanx
