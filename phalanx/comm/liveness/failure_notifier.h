// FailureNotifier: tells the ranks of a gloo or mpi world, outside the data path, which ranks died, which gave up and
// why, and how far each has come.
//
// One thread per rank blocks on the store, through its own client. Without a failure nothing is exchanged. Torch-free.
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
  /// One group of this rank: the world, or a group split from it.
  struct Group {
    std::string id;
    std::vector<int> members;                // world ranks
    std::atomic<std::uint64_t> sequence{0};  // number of collectives started
  };

  FailureNotifier(const std::shared_ptr<Store>& store, int rank, int size);
  /// Tells the others that this rank leaves in order. If the store is silent this takes 0.3 s. The others then learn it
  /// when the store answers again, unless the store declares this rank dead first.
  ~FailureNotifier();
  FailureNotifier(const FailureNotifier&) = delete;
  FailureNotifier& operator=(const FailureNotifier&) = delete;

  void add(const std::shared_ptr<Group>& group);

  /// Tells the members of the group that this rank gives it up. Works once per group; later reasons are dropped.
  void announce_abort(const Group& group, const std::string& reason) noexcept;
  /// Why the group cannot continue: a member died at least `age` ago, or announced an abort. Empty: it can continue.
  std::string failure_reason(const Group& group, std::chrono::milliseconds age = {}) const;
  /// The two causes of a failure, separately: the first announced abort, or empty; and the ranks of the group that
  /// died.
  std::string announced_abort(const Group& group) const;
  std::vector<int> lost(const Group& group) const;
  /// Ranks of the group that closed their FailureNotifier in order: they ended, or destroyed all their communicators.
  std::vector<int> left(const Group& group) const;
  /// The connection to the store is lost, so this rank learns nothing more about the others.
  bool is_store_lost() const noexcept { return is_store_lost_.load(std::memory_order_acquire); }
  /// World ranks of the group that have not started collective number `sequence`. Asks them; waits at most one second.
  std::vector<int> behind(const Group& group, std::uint64_t sequence);

 private:
  void run();
  void post_event(const std::string& text);
  void handle_event(const std::string& event);

  std::shared_ptr<Store> store_;  // a client of its own
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
