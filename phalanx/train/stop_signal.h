// Signals as a wish to stop: in a training step the handler only raises a flag, which the training loop reads between
// steps. Outside of the steps there is nothing to save, and the first signal ends the process.
//
//   StopSignal stop({.in_steps = false});  // installs the handlers, gives the old ones back when it goes
//   stop.set_in_steps(true);
//   while (!done) { ...; if (stop.requested()) { save(); break; } }
//   stop.set_in_steps(false);
//
// - A second signal ends the process at once, as if there were no handler; within `debounce` of the first it is taken
//   for the same wish, since Ctrl-C may reach a rank both from the terminal and through its launcher.
// - SIGHUP and SIGXCPU come more than once by themselves (shell and kernel both send SIGHUP; the kernel sends SIGXCPU
//   every second), so they never count as a second one. SIGHUP that is ignored from the start, as under nohup, stays
//   ignored.
//
// One object per process.
#pragma once

#include <chrono>
#include <csignal>
#include <string>
#include <utility>
#include <vector>

namespace phalanx::train {

/// What a user, a terminal or a batch system sends to end a job: SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU.
std::vector<int> default_stop_signals();

struct StopSignalOptions {
  std::vector<int> signals = default_stop_signals();
  std::chrono::milliseconds debounce{1'000};
  bool in_steps = true;  // at first
  std::string
      exit_message;  // said on standard error, with the reason, where a signal ends the process; empty: nothing is
};

class StopSignal {
 public:
  explicit StopSignal(const StopSignalOptions& options = {});
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  void set_in_steps(bool in_steps) const noexcept;
  bool requested() const noexcept;
  int signal_number() const noexcept;  // the first one's; 0 while not requested

 private:
  std::vector<std::pair<int, struct sigaction>> old_;
};

}  // namespace phalanx::train
