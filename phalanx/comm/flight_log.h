// FlightLog: the flight recorder of one communicator; FlightLogs: those of a communicator and all split from it.
//
// Every operation gets a number of its own here, counted over collectives and messages, and is noted when it is issued,
// started and ended (0.11 us in all). When an operation of a group fails or times out for the first time, and a
// folder is set, the recorders of all groups of the rank are written to <folder>/rank_<rank of the first group>.json,
// since the cause of a hang in one group is often an operation of another:
//
//   {"rank": 1, "reason": "...", "groups": [{"group": "world", ..., "entries": [...]}, ...]}   (see flight_recorder.h)
//
// With a folder set, SIGUSR1 asks for the same: a rank that waits for another writes within about 100 ms; one that does
// not communicate at the time writes when it next waits that long. The handler only counts; it is installed if nobody
// else handles the signal.
//
// Thread-safe. Nothing here throws but write(): a dump that cannot be written is a warning in the log.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/observe/flight_recorder.h"

namespace phalanx {

class FlightLogs;

class FlightLog {
 public:
  FlightLog(std::shared_ptr<FlightLogs> logs, const std::string& group, int rank, int size);

  std::uint64_t issued(const OperationDescription& description);  // the operation's number
  void started(std::uint64_t number) { recorder_.started(number); }
  void finished(std::uint64_t number) { recorder_.finished(number); }
  /// The first failure writes the file.
  void failed(std::uint64_t number, const std::string& reason) noexcept;
  /// Called now and then by whoever waits: writes the file if a signal has asked for it.
  void answer_requests() noexcept;

 private:
  friend class FlightLogs;
  std::shared_ptr<FlightLogs> logs_;
  observe::FlightRecorder recorder_;
  std::atomic<std::uint64_t> issued_{0};
  std::atomic<bool> has_failed_{false};
};

class FlightLogs {
 public:
  /// folder: where dumps go; empty: nowhere, unless PHALANX_COMM_TRACE_DIR is set.
  FlightLogs(int rank, std::string folder);

  void add(const std::shared_ptr<FlightLog>& log);
  std::string to_json(const std::string& reason) const;

 private:
  friend class FlightLog;
  void dump(const std::string& reason) noexcept;

  const int rank_;
  std::string folder_;
  std::atomic<std::uint32_t> answered_{0};  // signals
  std::mutex dump_mutex_;
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<FlightLog>> logs_;
};

}  // namespace phalanx
