// The supervisor behind `phalanx launch`: starts the ranks of one machine, watches over them, ends them. Torch-free.
//
// - Ranks get torchrun's variables, PHALANX_STORE (a store that the supervisor hosts on loopback) and
// PHALANX_REPORT_DIR
//   (worker_report.h), and an environment prepared for their number (environment_preparation.h).
// - Rank 0's output passes through untouched; the lines of the others are prefixed with "[rank] ". Rank 0 inherits a
//   standard input that is no terminal; the others have none.
// - The first rank that fails ends the others (SIGTERM, later SIGKILL). The result tells of the root cause only: a rank
//   whose error is a CommError lost its peer, so another rank's own error, exit or signal goes before it.
// - SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on. Ranks that announced a graceful stop get the time they asked
// for;
//   others are killed 1.5 s after SIGINT (30 s after the rest). A second signal kills at once.
// - Ranks, and what they started, end with the supervisor, even when it is killed by SIGKILL.
//
// One call at a time in a process, from a thread that stays; the signals are taken for its duration.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "phalanx/launch/environment_preparation.h"

namespace phalanx {

struct SupervisorOptions {
  std::vector<std::string> command;  // program and arguments
  int ranks = 1;
  EnvironmentMap environment = current_environment();
  bool prefix_rank_0 = false;
  std::chrono::milliseconds interrupt_grace{1'500};
  std::chrono::milliseconds terminate_grace{30'000};
  std::chrono::milliseconds failure_grace{5'000};  // between SIGTERM and SIGKILL of the ranks that did not fail
  std::chrono::milliseconds blame_grace{500};      // how long a CommError waits for the error that caused it
};

struct SupervisorResult {
  int exit_status = 0;   // 0; 2 if the failing rank's was 2; 128 + signal; else 1
  int failed_rank = -1;  // the root cause's
  std::string error;     // one text for the user; empty on success and after a stop that was asked for
};

/// Throws UsageError if the program cannot be run.
SupervisorResult supervise(const SupervisorOptions& options);

}  // namespace phalanx
