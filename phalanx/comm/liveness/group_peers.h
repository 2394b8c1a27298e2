// GroupPeers: a rank's view of the other ranks of its group, outside the data path, for backends that span nodes (gloo,
// mpi). It knows which ranks have arrived, died, given up or stopped, and how far each has come. Torch-free.
//
// The world's group creates the HeartbeatMonitor during its rendezvous. Groups split from it share the HeartbeatMonitor
// and the FailureNotifier.
//
//   GroupPeers peers(std::move(setup));
//   auto identities = peers.rendezvous("rank", ProcessProbe::identity());  // throws if a rank dies, stops, is missing
//   peers.begin(identities);
//   // ...
//   peers.check_wait("collective 12");                                     // every 100 ms while waiting
//   peers.end_wait();
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/liveness/failure_notifier.h"
#include "phalanx/comm/liveness/heartbeat_monitor.h"
#include "phalanx/store/store.h"

namespace phalanx {

class GroupPeers {
 public:
  struct Setup {
    std::string backend;                                // for error texts: "gloo"
    std::shared_ptr<Store> store;                       // the whole world's
    std::shared_ptr<FailureNotifier> failure_notifier;  // the world's
    // The world's. Null for the group of the world itself: begin() makes it.
    std::shared_ptr<HeartbeatMonitor> heartbeat_monitor;
    HeartbeatMonitor::Options heartbeat_options;
    std::string id;            // of the group; unique in the store
    std::vector<int> members;  // world ranks
    int rank = 0;              // in members
    std::chrono::milliseconds connect_timeout{};
  };
  explicit GroupPeers(Setup setup);
  /// The setup of a group of some of these ranks. `members` are ranks of this group.
  Setup split(std::uint64_t serial, const std::vector<int>& members, int rank) const;

  int rank() const noexcept { return setup_.rank; }
  int size() const noexcept { return static_cast<int>(setup_.members.size()); }
  const std::string& id() const noexcept { return setup_.id; }
  const std::vector<int>& members() const noexcept { return setup_.members; }

  // Making the group. These throw CommError.
  /// Collective. Returns every member's value, in rank order.
  std::vector<std::string> rendezvous(const std::string& name, const std::string& value);
  /// Call it once the ranks' processes are known: identities[r] is ProcessProbe::identity() of rank r.
  void begin(const std::vector<std::string>& identities);
  /// Call it every 100 ms while the group is being made.
  void throw_if_peer_failed();
  /// Call it when the group has been made: from then on this rank answers the others' questions about it.
  void add() { setup_.failure_notifier->add(group_); }

  // The ranks below are ranks of the group.
  /// Why the group cannot continue; empty: it can. announced_failure() knows what was announced: a rank died (at least
  /// `age` ago), or gave up. failure_reason() also reports what this rank observes: a rank is stopped, or has been
  /// silent for longer than the heartbeat limit allows.
  std::string announced_failure(std::chrono::milliseconds age = {}) const;
  std::string failure_reason(std::chrono::milliseconds age = {}) const;
  /// announced_abort(): the first reason that a rank gave for giving up, or empty. lost(): the ranks that have died.
  std::string announced_abort() const { return setup_.failure_notifier->announced_abort(*group_); }
  std::vector<int> lost() const { return setup_.failure_notifier->lost(*group_); }
  /// True if the rank can do nothing any more: it is dead, stopped or silent.
  bool is_unresponsive(int rank) const;
  /// For a group whose connections broke although no member is known to have died: which ranks ended in order.
  std::string who_left() const;
  /// For a group about whose members nothing is known: says that this rank itself lost the store, or gets no answer
  /// from it, if so.
  std::string disconnect_reason() const;

  /// The waiting thread calls it about every 100 ms. Publishes what this rank waits for. Throws CommError if the wait
  /// is in vain.
  void check_wait(const std::string& for_what, std::chrono::milliseconds age = {});
  void end_wait();
  /// What each rank last published that it waits for; empty: nothing.
  /// REQUIRES: size() >= 2.
  std::vector<std::string> states() const;
  /// The ranks that have not started the collective of that number. Asks them, for at most one second.
  std::vector<int> behind(std::uint64_t collective) const;
  std::uint64_t begin_collective() { return group_->sequence.fetch_add(1); }
  std::uint64_t collectives_begun() const { return group_->sequence.load(); }

  /// Tells the others that this rank gives the group up. Does nothing if the store is silent, because that would delay
  /// the error.
  void announce_abort(const std::string& reason) noexcept;

 private:
  int world_rank(int rank) const { return setup_.members[static_cast<std::size_t>(rank)]; }

  Setup setup_;
  std::shared_ptr<FailureNotifier::Group> group_ = std::make_shared<FailureNotifier::Group>();
};

}  // namespace phalanx
