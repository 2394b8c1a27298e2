// Worlds of processes to which things happen (tests only): killed, stopped, continued, and watched until the last has
// ended.
//
// Ranks are forked; the test tells them apart by signals and by a page that all share. Nothing is timed by sleeping:
// who waits for another sleeps on a futex word of that page. Times are counted from the fault.
//
// How late an error may come is a promise about a machine that has a core for whoever wants one. So what counts is the
// time from the fault less the time in which, by /proc/pressure/cpu, somebody wanted a core and had none; whatever the
// machine does, ten times the bound is too late (late()).
//
//   FaultWorld world(3, [&](FaultRank& rank) {
//     auto comm = ...;
//     rank.arrive();                                        // "I am in the middle of it"
//     const std::string text = rank.error_within(1s, [&] { comm->barrier(); });
//   });
//   world.await(3, 1);                 // all three have arrived once
//   world.strike(1, SIGKILL);
//   EXPECT_EQ(world.finish(), "");     // what was wrong with any rank
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace phalanx {

/// Now, and how long the machine has been short of cores so far (nothing: it does not say).
struct LoadedTime {
  std::chrono::steady_clock::time_point at;
  std::optional<std::chrono::microseconds> crowded;
  static LoadedTime now();
};
/// Empty if the time from `since` to now is within the bound, as said above; else both times in words. *took: the time.
std::string late(const LoadedTime& since, std::chrono::milliseconds bound, std::chrono::milliseconds* took = nullptr);

/// Lets go of the only reference, such as one to a communicator. Throws std::runtime_error if that takes longer than
/// it may beside a silent store.
template <class T>
void require_leaving_in_time(std::shared_ptr<T>& last);

struct FaultPage;

class FaultRank {
 public:
  FaultRank(FaultPage* page, int rank) : page_(page), rank_(rank) {}
  int rank() const { return rank_; }
  /// Counts; the test may wait for it.
  void arrive();
  /// Sleeps until the test says go(number).
  void await_go(int number);
  bool is_told(int number) const;  // whether it has
  /// The text of the CommError that body throws, at most `bound` after the fault. Throws std::runtime_error without
  /// one.
  template <class Body>
  std::string error_within(std::chrono::milliseconds bound, Body body);
  /// Throws std::runtime_error if it is later than `bound` after the fault.
  void require_in_time(std::chrono::milliseconds bound, const std::string& what);
  /// Of the fault, as the test wrote it down; zero before it.
  LoadedTime fault() const;
  std::string shared_text() const;  // 256 bytes for whoever needs them, such as an address
  void set_shared_text(const std::string& text);

 private:
  FaultPage* page_;
  int rank_;
};

class FaultWorld {
 public:
  FaultWorld(int size, const std::function<void(FaultRank&)>& body);
  ~FaultWorld();  // kills and reaps what is left
  FaultWorld(const FaultWorld&) = delete;
  FaultWorld& operator=(const FaultWorld&) = delete;

  /// Until `rank` has arrived that often, or ended. False after a minute.
  bool await(int rank, int arrivals);
  bool await_end(int rank);
  bool has_arrived(int rank, int arrivals) const;
  void go(int number);
  /// Sends the signal, and notes the time just before, unless a fault has been noted.
  void strike(int rank, int signal);
  /// Notes the time of a fault that the test brings about itself, just before it does.
  void note_fault();
  /// Sends it without noting a time.
  void send(int rank, int signal);
  /// Waits for all ranks, at most a minute. One line per rank that ended in another way than 0, or, for a rank that was
  /// struck by SIGKILL, than by that.
  std::string finish();
  std::chrono::milliseconds worst() const;  // of all times that ranks have asked to be within a bound
  const std::vector<pid_t>& processes() const { return children_; }

 private:
  bool reap(int rank, bool wait);
  FaultPage* page_;
  std::vector<pid_t> children_;
  std::vector<int> statuses_;  // -1: runs
  std::vector<bool> killed_;
};

/// A world of which one rank is killed when all have come to the same point: prepare(rank) brings them there, and
/// returns what the survivors do then. What was wrong with any rank.
std::string kill_one_of(int size, int victim, const std::function<std::function<void()>(FaultRank&)>& prepare);

// ---------------------------------------------------------------------------------------------------------------------

namespace fault_detail {
std::string comm_error_of(const std::function<void()>& body);
void require_quick_end(const LoadedTime& begin);
}  // namespace fault_detail

template <class T>
void require_leaving_in_time(std::shared_ptr<T>& last) {
  const LoadedTime begin = LoadedTime::now();
  last.reset();
  fault_detail::require_quick_end(begin);
}

template <class Body>
std::string FaultRank::error_within(std::chrono::milliseconds bound, Body body) {
  std::string text = fault_detail::comm_error_of(body);
  require_in_time(bound, text);
  return text;
}

}  // namespace phalanx
