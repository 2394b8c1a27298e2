// SIGTERM and SIGINT as a wish to stop: the handler only raises a flag, which the training loop reads between steps.
//
//   StopSignal stop;                       // installs the handlers, gives the old ones back when it goes
//   while (!done) { ...; if (stop.requested()) { save(); break; } }
//
// A second signal ends the process at once, as if there were no handler; within the first second or two it is taken for
// the same wish, since Ctrl-C may reach a rank both from the terminal and through its launcher. One object per process.
#pragma once

#include <csignal>

namespace phalanx::train {

class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  bool requested() const noexcept;
  int signal_number() const noexcept;  // 0 while not requested

 private:
  struct sigaction old_term_ {};
  struct sigaction old_int_ {};
};

}  // namespace phalanx::train
