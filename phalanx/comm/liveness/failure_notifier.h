// FailureNotifier: how the ranks of a gloo or mpi world hear of each other beside its data: who has died, who gave up and
// why, how far each has come. One thread per rank blocks on the store, as a client of its own; nothing is exchanged
// while all is well. Torch-free.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/store/store.h"

namespace phalanx {

class FailureNotifier {
 public:
  /// One group (the world, or one split from it) of this rank.
  struct Group {
    std::string id;
    std::vector<int> members;                // world ranks
    std::atomic<std::uint64_t> sequence{0};  // collectives begun
  };

  FailureNotifier(const std::shared_ptr<Store>& store, int rank, int size);
  /// Tells the others that this rank leaves in order. Beside a silent store it takes 0.3 s; the others then learn it
  /// when the store speaks again, unless that takes this rank for dead before.
  ~FailureNotifier();
  FailureNotifier(const FailureNotifier&) = delete;
  FailureNotifier& operator=(const FailureNotifier&) = delete;

  void add(const std::shared_ptr<Group>& group);

  /// Tells the members of the group that this rank gives it up. Once per group; later reasons are dropped.
  void announce_abort(const Group& group, const std::string& reason) noexcept;
  /// Why the group can go on no more: a member died at least `age` ago, or announced an abort. Empty: it can.
  std::string failure_reason(const Group& group, std::chrono::milliseconds age = {}) const;
  /// The two causes of trouble, each by itself: the first announced abort, or empty; ranks of the group that have died.
  std::string announced_abort(const Group& group) const;
  std::vector<int> lost(const Group& group) const;
  /// Ranks of the group that have let go of their watch in order: they ended, or gave up all their communicators.
  std::vector<int> left(const Group& group) const;
  /// The store has gone, so nothing more will be heard of anybody.
  bool is_store_lost() const noexcept { return is_store_lost_.load(std::memory_order_acquire); }
  /// World ranks of the group that have not begun collective number `sequence`: they are asked, for at most a second.
  std::vector<int> behind(const Group& group, std::uint64_t sequence);

 private:
  void run();
  void post_event(const std::string& text);
  void handle_event(const std::string& event);

  std::shared_ptr<Store> store_;  // the watch's own client
  int rank_;
  int size_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> is_store_lost_{false};
  std::atomic<std::uint64_t> next_event_{0};
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Group>> groups_;
  std::map<int, std::chrono::steady_clock::time_point> dead_;
  std::vector<int> left_;
  std::map<std::string, std::string> aborted_;  // group id -> reason, as the first announced
  std::map<std::string, bool> announced_;
  std::thread thread_;
};

}  // namespace phalanx
