// FaultWorld: worlds of processes in which ranks are killed, stopped and continued, and that are watched until the last
// process has ended (tests only).
//
// Ranks are forked. The test controls them by signals and through a page of shared memory. No timing depends on sleeps:
// a process that waits for another sleeps on a futex word of that page. Times are measured from the fault.
//
// The bound on the delay of an error holds for a node with a core for every thread that needs one. So the measured
// time excludes the time in which, by /proc/pressure/cpu, some thread needed a core and had none. But ten times the
// bound is always too late (late()). Under a sanitizer the bound is ten times as long.
//
//   FaultWorld world(3, [&](FaultRank& rank) {
//     auto comm = ...;
//     rank.arrive();                                        // "I am in the middle of it"
//     const std::string text = rank.error_within(1s, [&] { comm->barrier(); });
//   });
//   for (int rank = 0; rank < 3; ++rank) world.await(rank, 1);  // all ranks have arrived once
//   world.strike(1, SIGKILL);
//   EXPECT_EQ(world.finish(), "");                              // the failures of all ranks
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

#include "phalanx/base/testing/error_text.h"

namespace phalanx {

/// The current time, and how long the node has been short of cores so far (nullopt: unknown).
struct LoadedTime {
  std::chrono::steady_clock::time_point at;
  std::optional<std::chrono::microseconds> crowded;
  static LoadedTime now();
};
/// Returns "" if the time from `since` to now is within the bound, as explained above; otherwise a text with both
/// times. *took is set to the time.
std::string late(const LoadedTime& since, std::chrono::milliseconds bound, std::chrono::milliseconds* took = nullptr);

/// Releases the only reference to an object such as a communicator. Throws std::runtime_error if this takes longer than
/// is allowed with a store that does not answer.
template <class T>
void require_leaving_in_time(std::shared_ptr<T>& last);

struct FaultPage;

class FaultRank {
 public:
  FaultRank(FaultPage* page, int rank) : page_(page), rank_(rank) {}
  int rank() const { return rank_; }
  /// Counts one arrival; the test may wait for it.
  void arrive();
  /// Sleeps until the test says go(number).
  void await_go(int number);
  bool is_told(int number) const;  // true if the test has called go(number)
  /// Runs `body`, which must throw a CommError at most `bound` after the fault, and returns the text of that error.
  /// Throws std::runtime_error if there is no such error, or if it is late.
  template <class Body>
  std::string error_within(std::chrono::milliseconds bound, Body body);
  /// Throws std::runtime_error if it is later than `bound` after the fault.
  void require_in_time(std::chrono::milliseconds bound, const std::string& what);
  /// The time of the fault, as noted by the test; zero before it.
  LoadedTime fault() const;
  std::string shared_text() const;  // up to 256 bytes that all ranks share, such as an address
  void set_shared_text(const std::string& text);

 private:
  FaultPage* page_;
  int rank_;
};

class FaultWorld {
 public:
  FaultWorld(int size, const std::function<void(FaultRank&)>& body);
  ~FaultWorld();  // kills and reaps the remaining processes
  FaultWorld(const FaultWorld&) = delete;
  FaultWorld& operator=(const FaultWorld&) = delete;

  /// Waits until `rank` has arrived that often or has ended. False after a minute.
  bool await(int rank, int arrivals);
  bool await_end(int rank);
  bool has_arrived(int rank, int arrivals) const;
  void go(int number);
  /// Sends the signal. Notes the time just before it as the fault, unless a fault was noted already.
  void strike(int rank, int signal);
  /// Notes the time of a fault that the test causes itself. Call it just before.
  void note_fault();
  /// Sends the signal without noting a time.
  void send(int rank, int signal);
  /// Waits for all ranks, at most a minute. Returns one line for each rank that did not end with status 0; a rank that
  /// was struck by SIGKILL must end by SIGKILL.
  std::string finish();
  std::chrono::milliseconds worst() const;  // the longest time that a rank has checked against a bound
  const std::vector<pid_t>& processes() const { return children_; }

 private:
  bool reap(int rank, bool wait);
  FaultPage* page_;
  std::vector<pid_t> children_;
  std::vector<int> statuses_;  // -1: runs
  std::vector<bool> killed_;
};

/// Runs a world and kills one rank when all ranks are at the same point. prepare(rank) brings a rank there, and returns
/// the function that the survivors run next. Returns the failures of all ranks.
std::string kill_one_of(int size, int victim, const std::function<std::function<void()>(FaultRank&)>& prepare);

// ---------------------------------------------------------------------------------------------------------------------

namespace fault_detail {
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
  std::string text = require_error<CommError>(body);
  require_in_time(bound, text);
  return text;
}

}  // namespace phalanx
