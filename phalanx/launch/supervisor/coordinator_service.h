// Runs the coordinator on the node that hosts the rendezvous store: reads what members write into it, writes orders,
// and notices members that give no sign of life. See node_membership.h for the keys. Torch-free.
//
// What it cannot go on after (a message that it does not understand, say) ends the job with an order that tells why. A
// node whose very first message is not understood, as another Phalanx's may be, is refused alone.
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
  /// Starts a thread that uses the store; it ends with the object. `broken`, called by that thread, hears of it when
  /// nothing can be written into the store any more, so that no order will come to tell of that.
  CoordinatorService(std::shared_ptr<Store> store, CoordinatorOptions options, KeepAlive keep_alive, Broken broken);
  ~CoordinatorService();
  CoordinatorService(const CoordinatorService&) = delete;
  CoordinatorService& operator=(const CoordinatorService&) = delete;

  /// Once the job has ended: waits until every member has gone, for `limit` at most. Else returns at once.
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
extern const char* const kMembers;  // how many have joined: a hint
}  // namespace rendezvous_keys

/// The first of the keys that exists, nullopt after the timeout. Throws CommError if the store cannot be asked.
std::optional<std::string> wait_for_any(Store& store, const std::vector<std::string>& keys,
                                        std::chrono::milliseconds timeout);

}  // namespace phalanx
