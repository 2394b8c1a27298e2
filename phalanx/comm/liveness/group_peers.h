// GroupPeers: what a rank knows of the other ranks of its group beside their data, where the ranks may be on different
// machines (gloo, mpi): who has come, died, given up, stopped, and how far each is. Torch-free.
//
// The group of the world makes the pulse as its ranks meet; groups split from it share that, and the watch.
//
//   GroupPeers peers(std::move(setup));
//   auto identities = peers.rendezvous("rank", ProcessProbe::identity());    // throws if one dies, stops or stays away
//   peers.begin(identities);
//   ...
//   peers.check_wait("collective 12");                             // every 100 ms while waiting
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
    std::shared_ptr<Store> store;                       // of the whole world
    std::shared_ptr<FailureNotifier> failure_notifier;  // the world's
    std::shared_ptr<HeartbeatMonitor>
        heartbeat_monitor;  // the world's; null for the group that is the world: begin() makes it
    HeartbeatMonitor::Options heartbeat_options;
    std::string id;            // the group's, unique in the store
    std::vector<int> members;  // world ranks
    int rank = 0;              // in members
    std::chrono::milliseconds connect_timeout{};
  };
  explicit GroupPeers(Setup setup);
  /// That of a group of some of these ranks, by their ranks here.
  Setup split(std::uint64_t serial, const std::vector<int>& members, int rank) const;

  int rank() const noexcept { return setup_.rank; }
  int size() const noexcept { return static_cast<int>(setup_.members.size()); }
  const std::string& id() const noexcept { return setup_.id; }
  const std::vector<int>& members() const noexcept { return setup_.members; }

  // Making the group. All throw CommError.
  /// Every member's value, by rank.
  std::vector<std::string> rendezvous(const std::string& name, const std::string& value);
  /// The ranks' processes are known from here on: ProcessProbe::identity() of each.
  void begin(const std::vector<std::string>& identities);
  /// To be asked every 100 ms while the group is being made.
  void throw_if_peer_failed();
  /// The group has been made: the others' questions about it are answered.
  void add() { setup_.failure_notifier->add(group_); }

  // Of the ranks of the group, by their numbers in it.
  /// Why the group can go on no more. What was told: a rank has died (at least `age` ago), or gave up; with failure_reason(),
  /// also what was seen: a rank is stopped, or has been silent for longer than the heartbeat limit allows.
  std::string announced_failure(std::chrono::milliseconds age = {}) const;
  std::string failure_reason(std::chrono::milliseconds age = {}) const;
  /// The first reason that a rank gave for giving up, or empty; the ranks that have died.
  std::string announced_abort() const { return setup_.failure_notifier->announced_abort(*group_); }
  std::vector<int> lost() const { return setup_.failure_notifier->lost(*group_); }
  /// Whether it is one that can do nothing any more: dead, stopped, or silent.
  bool is_unresponsive(int rank) const;
  /// Of a group whose connections broke and of whose members none is said to have died: who has ended in order.
  std::string who_left() const;
  /// Of one of whose members nothing is known at all: that this rank itself has lost the store, if it has.
  std::string disconnect_reason() const;

  /// To be called about every 100 ms by whoever waits: tells the others for what, and throws CommError if that is in
  /// vain.
  void check_wait(const std::string& for_what, std::chrono::milliseconds age = {});
  void end_wait();
  /// What each rank last said that it waits for; empty: nothing. Groups of two and more.
  std::vector<std::string> states() const;
  /// Who has not begun the collective of that number. Asks, for a second at most.
  std::vector<int> behind(std::uint64_t collective) const;
  std::uint64_t begin_collective() { return group_->sequence.fetch_add(1); }
  std::uint64_t collectives_begun() const { return group_->sequence.load(); }

  /// Tells the others that this rank gives the group up, unless the store is silent: that would hold up the error.
  void announce_abort(const std::string& reason) noexcept;

 private:
  int world_rank(int rank) const { return setup_.members[static_cast<std::size_t>(rank)]; }

  Setup setup_;
  std::shared_ptr<FailureNotifier::Group> group_ = std::make_shared<FailureNotifier::Group>();
};

}  // namespace phalanx
