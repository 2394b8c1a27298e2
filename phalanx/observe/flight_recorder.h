// FlightRecorder: records the last operations of one communicator, for the analysis of a hang or failure.
//
// It is always on. It is a ring of fixed size (2,048 operations by default). Recording costs one lock, which is rarely
// contended, and no allocation. The communicator writes it as JSON on an error, on a timeout and on request.
// flight_analysis.h compares the dumps of all ranks: the cause is the first collective that differs between ranks or is
// missing on a rank.
//
// Thread-safe. The caller gives the sequence numbers (the communicator's own); they must grow. Updates of an operation
// that has left the ring are ignored.
//
//   observe::FlightRecorder recorder({.group = "dp", .id = "world/0.1", .rank = 1, .size = 2, .members = {1, 3}});
//   recorder.issued(
//       {.seq = 17, .collective = 12, .verb = "all_reduce", .dtype = "float32", .count = 4096, .op = "sum"});
//   recorder.started(17);
//   recorder.finished(17);
//   write_file("flight-rank1-dp.json", recorder.to_json());
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/observe/device_times.h"

namespace phalanx::observe {

struct FlightRecorderOptions {
  std::string group;    // the communicator's name
  std::string id = {};  // distinguishes groups with the same name; the same on all members
  int rank = 0;
  int size = 1;
  std::vector<int> members = {};  // [size]: each member's rank in the first group of the job
  std::size_t capacity = 2048;
};

enum class FlightState : std::uint8_t { issued, started, finished, failed };
std::string_view name_of(FlightState state);

struct FlightEntry {
  static constexpr int kNone = -1;

  std::uint64_t seq = 0;            // this rank's sequence number, over collectives and messages
  std::int64_t collective = kNone;  // number among the group's collectives, the same on every rank; kNone: a message
  std::string_view verb;            // verb, dtype and op point to text of static duration, e.g. name_of(Verb)
  std::string_view dtype;
  std::int64_t count = 0;  // elements
  std::string_view op;     // reductions only
  int root = kNone;        // rooted verbs only
  int peer = kNone;        // send and recv only
  int tag = kNone;
  bool uneven = false;  // a collective whose counts may differ between ranks

  // Filled in by the recorder. Times are in microseconds since the epoch; 0: not reached.
  FlightState state = FlightState::issued;
  std::int64_t issued_us = 0;
  std::int64_t started_us = 0;
  std::int64_t ended_us = 0;
  // When a thread of this rank waited for the operation, or, on a device, one of its streams; not in to_json().
  std::int64_t wait_from_us = 0;
  std::int64_t wait_until_us = 0;
};

/// "all_reduce(float32[4096], sum)", "broadcast(int64[3], root 1)", "send(float32[8] to rank 2, tag 0)": as in errors.
/// With `members`, root and peer are given as ranks of the job.
std::string describe(const FlightEntry& entry, std::span<const int> members = {});

class FlightRecorder {
 public:
  explicit FlightRecorder(FlightRecorderOptions options);

  void issued(FlightEntry entry);
  void started(std::uint64_t seq);
  void finished(std::uint64_t seq);
  /// The same for an operation that a device has worked on, by the device's times.
  void finished(std::uint64_t seq, const DeviceTimes& times);
  void failed(std::uint64_t seq);
  /// Records that a thread of this rank only waited for the operation, from `from` until now.
  void waited(std::uint64_t seq, std::chrono::system_clock::time_point from);

  std::vector<FlightEntry> snapshot() const;    // the oldest first
  std::vector<FlightEntry> unfinished() const;  // the entries of snapshot() that neither finished nor failed
  std::uint64_t recorded() const;               // the number of operations since the start, with overwritten ones

  /// {"group", "id", "rank", "size", "members", "recorded", "entries": [{"seq", "collective", "verb", "dtype", "count",
  /// "op", "root", "peer", "tag", "uneven", "state", "issued_us", "started_us", "ended_us"}]}. Keys that do not apply
  /// to a verb are left out.
  std::string to_json() const;

 private:
  FlightEntry* find(std::uint64_t seq);
  void end(std::uint64_t seq, FlightState state);

  const FlightRecorderOptions options_;
  mutable std::mutex mutex_;
  std::vector<FlightEntry> ring_;
  std::uint64_t recorded_ = 0;
};

}  // namespace phalanx::observe
