// WorkerFailure: one rank (or one whole node) that did not end well, and the report that a launcher makes of all of
// them.
//
// The root cause is the failure with the smallest time, where a rank whose error is a CommError lost its peer and so
// comes after every rank with an error, exit status or signal of its own. Times of other nodes are brought to one clock
// before they are compared (coordinator.h). Ranks that end with the root cause's own error are only named. Torch-free.
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
  int exit_status = 0;   // what it ended with, or meant to end with when it was ended on its way out
  int signal = 0;        // that killed it; 0: none
  std::string kind;      // class of the error that it reported; empty: it reported none
  std::string message;   // that error's text; of a node: what happened to it
  double time_s = 0;     // since the epoch
  std::string log_file;  // that holds its standard error, if any

  bool is_secondary() const { return kind == "CommError"; }
};

/// True if `a` is more likely the cause than `b`.
bool precedes(const WorkerFailure& a, const WorkerFailure& b);

/// "rank 1 (host h, exit status 2): text", "rank 1 (host h) was killed by signal 9 (SIGKILL)".
std::string describe(const WorkerFailure& failure);

/// The root cause first, then the table of the others. `failures` must not be empty.
std::string failure_report(std::vector<WorkerFailure> failures);

/// What a launcher ends with: 2 if the rank did, 128 + signal, else 1.
int launcher_exit_status(const WorkerFailure& root_cause);

/// "signal 9 (SIGKILL)".
std::string signal_text(int signal);

}  // namespace phalanx
