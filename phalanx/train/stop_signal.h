// StopSignal turns signals into a request to stop. In a training step the handler only sets a flag, which the training
// loop reads between steps. Outside the steps there is nothing to save, and the first signal ends the process.
//
//   StopSignal stop({.in_steps = false});  // installs the handlers; the destructor restores the old ones
//   stop.set_in_steps(true);
//   while (!done) { train_step(); if (stop.requested()) { save(); break; } }
//   stop.set_in_steps(false);
//
// - A second signal ends the process at once, as if there were no handler. Within `debounce` of the first it counts as
//   the same request, since Ctrl-C may reach a rank both from the terminal and through its launcher.
// - SIGHUP and SIGXCPU repeat by themselves (both shell and kernel send SIGHUP; the kernel sends SIGXCPU every second),
//   so they never count as a second signal. SIGHUP that is ignored from the start, as under nohup, stays ignored.
//
// Only one object per process.
#pragma once

#include <chrono>
#include <csignal>
#include <string>
#include <utility>
#include <vector>

namespace phalanx::train {

/// The signals that a user, a terminal or a batch system sends to end a job: SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2,
/// SIGXCPU.
std::vector<int> default_stop_signals();

struct StopSignalOptions {
  std::vector<int> signals = default_stop_signals();
  std::chrono::milliseconds debounce{1'000};
  bool in_steps = true;      // at first
  std::string exit_message;  // printed to stderr with the reason when a signal ends the process; empty: no message
};

class StopSignal {
 public:
  explicit StopSignal(const StopSignalOptions& options = {});
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  void set_in_steps(bool in_steps) const noexcept;
  bool requested() const noexcept;
  int signal_number() const noexcept;  // the first signal's; 0 if none was received

 private:
  std::vector<std::pair<int, struct sigaction>> old_;
};

}  // namespace phalanx::train
