#include "phalanx/train/stop_signal.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ctime>

namespace phalanx::train {
namespace {

// Signals belong to the process, so this cannot be a member of an object.
volatile std::sig_atomic_t received_signal = 0;
volatile std::sig_atomic_t asked_by_user = 0;
volatile std::sig_atomic_t is_in_steps = 1;
std::int64_t asked_at_ms = 0;
std::int64_t debounce_ms = 0;

std::int64_t now_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

char exit_message[128];

void say(const char* text) { [[maybe_unused]] const auto written = write(STDERR_FILENO, text, std::strlen(text)); }

void end_by(int number, const char* why) {
  if (exit_message[0] != '\0') {
    say(exit_message);
    say(why);
  }
  std::signal(number, SIG_DFL);
  std::raise(number);  // delivered on return from the handler
}

void note_signal(int number) {
  if (received_signal == 0) {
    received_signal = number;
    if (is_in_steps == 0)
      return end_by(number, "before the first step or after the last save, so nothing was to be saved\n");
  }
  if (number == SIGHUP || number == SIGXCPU) return;
  if (asked_by_user == 0) {
    asked_at_ms = now_ms();
    asked_by_user = 1;
  } else if (now_ms() - asked_at_ms >= debounce_ms) {
    end_by(number, "for the second time, so the steps since the last checkpoint are lost\n");
  }
}

}  // namespace

std::vector<int> default_stop_signals() { return {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU}; }

StopSignal::StopSignal(const StopSignalOptions& options) {
  received_signal = 0;
  asked_by_user = 0;
  debounce_ms = options.debounce.count();
  is_in_steps = options.in_steps ? 1 : 0;
  options.exit_message.copy(exit_message, sizeof exit_message - 1);
  exit_message[std::min(options.exit_message.size(), sizeof exit_message - 1)] = '\0';
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;  // writes and waits of the current step continue
  sigemptyset(&action.sa_mask);
  for (const int number : options.signals) {
    struct sigaction before {};
    sigaction(number, nullptr, &before);
    old_.emplace_back(number, before);
    if (number == SIGHUP && before.sa_handler == SIG_IGN) continue;
    sigaction(number, &action, nullptr);
  }
}

StopSignal::~StopSignal() {
  for (const auto& [number, before] : old_) sigaction(number, &before, nullptr);
}

void StopSignal::set_in_steps(bool in_steps) const noexcept { is_in_steps = in_steps ? 1 : 0; }
bool StopSignal::requested() const noexcept { return received_signal != 0; }
int StopSignal::signal_number() const noexcept { return received_signal; }

}  // namespace phalanx::train
