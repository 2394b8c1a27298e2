#include "phalanx/train/stop_signal.h"

#include <cstddef>
#include <cstdint>
#include <ctime>

namespace phalanx::train {
namespace {

// Signals belong to the process, so this cannot belong to an object.
volatile std::sig_atomic_t received_signal = 0;
volatile std::sig_atomic_t asked_by_user = 0;
std::int64_t asked_at_ms = 0;
std::int64_t patience_ms = 0;

std::int64_t now_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

void note_signal(int number) {
  if (received_signal == 0) received_signal = number;
  if (number == SIGHUP) return;
  if (asked_by_user == 0) {
    asked_at_ms = now_ms();
    asked_by_user = 1;
  } else if (now_ms() - asked_at_ms >= patience_ms) {
    std::signal(number, SIG_DFL);
    std::raise(number);  // delivered on return from this handler
  }
}

}  // namespace

StopSignal::StopSignal(std::chrono::milliseconds patience) {
  received_signal = 0;
  asked_by_user = 0;
  patience_ms = patience.count();
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;  // writes and waits of the step under way go on
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &old_[i]);
    if (kSignals[i] == SIGHUP && old_[i].sa_handler == SIG_IGN) continue;
    sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignal::~StopSignal() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &old_[i], nullptr);
}

bool StopSignal::requested() const noexcept { return received_signal != 0; }
int StopSignal::signal_number() const noexcept { return received_signal; }

}  // namespace phalanx::train
