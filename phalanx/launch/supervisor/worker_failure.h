// WorkerFailure: a rank (or a whole node) that failed, and the report that a launcher makes from all failures.
// Torch-free.
//
// The root cause is the earliest failure. But a rank whose error is a CommError lost its peer, so it comes after every
// rank with another error, exit status or signal. Times of other nodes are converted to one clock before they are
// compared (coordinator_service.cc). Ranks with the same error as the root cause are only listed by number.
//
//   rank 3 (host gpu-b, exit status 2): [training] steps is -1
//   the same on ranks 4 to 7
//   other failures:
//     rank  host   local rank  pid   after     ended with     error
//     0     gpu-a  0           4711  +0.012 s  exit status 1  rank 3 is gone: ...
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace phalanx {

struct WorkerFailure {
  int rank = -1;  // -1: not a rank but a node
  int local_rank = -1;
  std::string host;
  pid_t pid = -1;
  int exit_status = 0;   // its exit status; if it was killed while it was ending, the status that it reported
  int signal = 0;        // the signal that killed it; 0: none
  std::string kind;      // class of the error that it reported; empty: it reported none
  std::string message;   // text of that error; for a node: what happened to it
  double time_s = 0;     // since the epoch
  std::string log_file;  // the file with its standard error, if any

  bool is_secondary() const { return kind == "CommError"; }
};

/// True if `a` is more likely the cause than `b`.
bool precedes(const WorkerFailure& a, const WorkerFailure& b);

/// "rank 1 (host h, exit status 2): text", "rank 1 (host h) was killed by signal 9 (SIGKILL)".
std::string describe(const WorkerFailure& failure);

/// The root cause first, then the table of the others. `failures` must not be empty.
std::string failure_report(std::vector<WorkerFailure> failures);

/// The launcher's exit status: 2 if the rank's was 2; 128 + signal; else 1.
int launcher_exit_status(const WorkerFailure& root_cause);

/// "signal 9 (SIGKILL)".
std::string signal_text(int signal);

}  // namespace phalanx
