// Runs the coordinator on the node that hosts the rendezvous store: reads what members write into it, writes orders,
// and notices members that give no sign of life. See node_membership.h for the keys. Torch-free.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/tcp_store.h"
#include "phalanx/launch/coordinator.h"

namespace phalanx {

class CoordinatorService {
 public:
  struct KeepAlive {
    std::chrono::milliseconds interval{5'000};
    int missed = 3;
  };
  /// Starts a thread that uses the store; it ends with the object.
  CoordinatorService(std::shared_ptr<TcpStore> store, CoordinatorOptions options, KeepAlive keep_alive);
  ~CoordinatorService();
  CoordinatorService(const CoordinatorService&) = delete;
  CoordinatorService& operator=(const CoordinatorService&) = delete;

  /// Once the job has ended: waits until every member has gone, for `limit` at most. Else returns at once.
  void wait_for_goodbyes(std::chrono::milliseconds limit);

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
extern const char* const kMembers;  // how many have joined: a hint
}  // namespace rendezvous_keys

/// The first of the keys that exists, nullopt after the timeout. Throws CommError if the store cannot be asked.
std::optional<std::string> wait_for_any(Store& store, const std::vector<std::string>& keys,
                                        std::chrono::milliseconds timeout);

}  // namespace phalanx
