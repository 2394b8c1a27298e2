#include "phalanx/train/stop_signal.h"

#include <ctime>

namespace phalanx::train {
namespace {

// Signals belong to the process, so this cannot belong to an object.
volatile std::sig_atomic_t received_signal = 0;
timespec received_at{};

void note_signal(int number) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (received_signal == 0) {
    received_at = now;
    received_signal = number;
  } else if (now.tv_sec - received_at.tv_sec >= 2) {
    std::signal(number, SIG_DFL);
    std::raise(number);  // delivered on return from this handler
  }
}

}  // namespace

StopSignal::StopSignal() {
  received_signal = 0;
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;  // writes and waits of the step under way go on
  sigemptyset(&action.sa_mask);
  sigaction(SIGTERM, &action, &old_term_);
  sigaction(SIGINT, &action, &old_int_);
}

StopSignal::~StopSignal() {
  sigaction(SIGTERM, &old_term_, nullptr);
  sigaction(SIGINT, &old_int_, nullptr);
}

bool StopSignal::requested() const noexcept { return received_signal != 0; }
int StopSignal::signal_number() const noexcept { return received_signal; }

}  // namespace phalanx::train
