// FlightLog: the flight recorder of one communicator; FlightLogs: those of a communicator and all split from it.
//
// Every operation gets a number of its own here, counted over collectives and messages, and is noted when it is issued,
// started and ended (0.11 us in all). When an operation of a group fails or times out for the first time, and a
// folder is set, the recorders of all groups of the rank are written to <folder>/<prefix><rank of the first
// group>.json, since the cause of a hang in one group is often an operation of another:
//
//   {"rank": 1, "size": 4, "host": "...", "pid": 4711, "written_us": ..., "reason": "...",
//    "groups": [{"group": "world", ..., "entries": [...]}, ...]}                                 (see
//    flight_recorder.h)
//
// The reason is the first failure's, also in what is written later; without a failure it is what asked for the file.
// With a folder set, SIGQUIT asks for the same, whatever the rank is doing (flight_signal.h). A file of an earlier run
// is set aside, as <name>.previous, when the first communicator is made, so that files of two runs are never mixed.
//
// Thread-safe. Nothing here throws but write(): a dump that cannot be written is a warning in the log.
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

/// Which group a log is of. Group ids are the same on all members and tell groups of the same name apart.
struct FlightGroup {
  std::string name;
  std::string id;
  int rank = 0;
  std::vector<int> members;  // ranks of the first group
};

struct FlightOptions {
  bool writes = true;  // else a line says that nothing is written, wherever something would be
  std::string folder;  // empty: nothing is written, unless PHALANX_COMM_TRACE_DIR is set
  std::string prefix = "rank_";
  std::size_t capacity = 2048;  // operations kept per group
};

class FlightLog {
 public:
  FlightLog(std::shared_ptr<FlightLogs> logs, FlightGroup group);

  std::uint64_t issued(const OperationDescription& description);  // the operation's number
  void started(std::uint64_t number) { recorder_.started(number); }
  void finished(std::uint64_t number) { recorder_.finished(number); }
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
  void dump(const std::string& reason) noexcept;  // writes the file, if there is a folder

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
  std::string failure_;  // the first
  std::vector<std::weak_ptr<FlightLog>> logs_;
};

}  // namespace phalanx
