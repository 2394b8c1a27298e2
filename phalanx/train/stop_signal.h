// SIGTERM, SIGINT and SIGHUP as a wish to stop: the handler only raises a flag, which the training loop reads between
// steps.
//
//   StopSignal stop;                       // installs the handlers, gives the old ones back when it goes
//   while (!done) { ...; if (stop.requested()) { save(); break; } }
//
// - A second SIGTERM or SIGINT ends the process at once, as if there were no handler; within `patience` of the first it
//   is taken for the same wish, since Ctrl-C may reach a rank both from the terminal and through its launcher.
// - SIGHUP, the end of the terminal, never counts as a second one: shell and kernel both send it, and closing the
// window
//   after Ctrl-C is no reason to lose the save. Ignored from the start, as under nohup, it stays ignored.
//
// One object per process.
#pragma once

#include <array>
#include <chrono>
#include <csignal>

namespace phalanx::train {

class StopSignal {
 public:
  explicit StopSignal(std::chrono::milliseconds patience = std::chrono::seconds(2));
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  bool requested() const noexcept;
  int signal_number() const noexcept;  // the first one's; 0 while not requested

 private:
  static constexpr std::array<int, 3> kSignals{SIGTERM, SIGINT, SIGHUP};
  std::array<struct sigaction, kSignals.size()> old_{};
};

}  // namespace phalanx::train
