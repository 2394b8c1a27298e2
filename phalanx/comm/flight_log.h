// FlightLog: the flight recorder of one communicator. FlightLogs: those of a communicator and all split from it.
//
// FlightLog numbers every operation, collectives and messages alike, and records when it is issued, started and
// finished (0.11 us in all). When an operation of a group first fails or times out, and a folder is set, the recorders
// of all groups of the rank are written to <folder>/<prefix><rank of the first group>.json. All groups, because the
// cause of a hang in one group is often an operation of another. The format (flight_recorder.h):
//
//   {"rank": 1, "size": 4, "host": "...", "pid": 4711, "written_us": ..., "reason": "...",
//    "groups": [{"group": "world", ..., "entries": [...]}, ...]}
//
// "reason" is that of the first failure, also in files written later. Without a failure it says what requested the
// file. With a folder set, SIGQUIT requests a file whatever the rank is doing (flight_signal.h). When the first
// communicator is made, the file of an earlier run is renamed to <name>.previous, so files of two runs never mix.
//
// Thread-safe. Failures of the recorder do not reach the caller: a dump that cannot be written is a warning in the log.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/observe/flight_recorder.h"

namespace phalanx {

class FlightLogs;

/// Identifies the group of a log. A group id is the same on all members and unique among groups of the same name.
struct FlightGroup {
  std::string name;
  std::string id;
  int rank = 0;
  std::vector<int> members;  // as ranks of the first group
};

struct FlightOptions {
  bool writes = true;  // false: logs a line instead, wherever a file would be written
  std::string folder;  // empty: nothing is written, unless PHALANX_COMM_TRACE_DIR is set
  std::string prefix = "rank_";
  std::size_t capacity = 2048;  // operations recorded per group
};

class FlightLog {
 public:
  FlightLog(std::shared_ptr<FlightLogs> logs, FlightGroup group);
  ~FlightLog();  // files that are written later still have the operations of a group that failed
  FlightLog(const FlightLog&) = delete;
  FlightLog& operator=(const FlightLog&) = delete;

  std::uint64_t issued(const OperationDescription& description);  // the operation's number
  void started(std::uint64_t number) { recorder_.started(number); }
  void finished(std::uint64_t number) { recorder_.finished(number); }
  void finished(std::uint64_t number, const observe::DeviceTimes& times) { recorder_.finished(number, times); }
  void waited(std::uint64_t number, std::chrono::system_clock::time_point from) { recorder_.waited(number, from); }
  /// The first failure writes the file.
  void failed(std::uint64_t number, const std::string& reason) noexcept;
  std::vector<observe::FlightEntry> snapshot() const { return recorder_.snapshot(); }

 private:
  friend class FlightLogs;
  std::shared_ptr<FlightLogs> logs_;
  observe::FlightRecorder recorder_;
  std::atomic<std::uint64_t> issued_{0};
  std::atomic<bool> has_failed_{false};
};

class FlightLogs {
 public:
  static std::shared_ptr<FlightLogs> make(int rank, int size, FlightOptions files);

  void add(const std::shared_ptr<FlightLog>& log);
  std::string to_json(const std::string& reason) const;
  void dump(const std::string& reason) noexcept;  // writes the file, if a folder is set

 private:
  friend class FlightLog;
  FlightLogs(int rank, int size, FlightOptions files);
  std::string path() const;
  void note_failure(const std::string& reason) noexcept;

  const int rank_;
  const int size_;
  FlightOptions files_;
  std::mutex dump_mutex_;
  mutable std::mutex mutex_;
  std::string failure_;            // the first
  std::vector<std::string> gone_;  // the last groups that failed before they were destroyed, as JSON
  std::vector<std::weak_ptr<FlightLog>> logs_;
};

}  // namespace phalanx
