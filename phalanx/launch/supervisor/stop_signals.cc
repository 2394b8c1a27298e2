#include "phalanx/launch/supervisor/stop_signals.h"

#include <fmt/format.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

bool is_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

SignalFd::SignalFd(const std::vector<int>& signals) {
  sigset_t set, blocked;
  sigemptyset(&set);
  for (const int signal : signals)
    if (signal != SIGHUP || !is_ignored(SIGHUP)) sigaddset(&set, signal);
  for (const int signal : {SIGCHLD, SIGUSR1, SIGUSR2, SIGQUIT}) sigaddset(&set, signal);
  blocked = set;
  sigaddset(&blocked, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  fd_.reset(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    throw Error(fmt::format("signalfd: {}", std::strerror(errno)));
  }
}

SignalFd::~SignalFd() {
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  const timespec at_once{};
  while (sigtimedwait(&pipe, nullptr, &at_once) == SIGPIPE) {
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

std::optional<int> SignalFd::next() {
  signalfd_siginfo info{};
  if (read(fd_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

const std::vector<int>& default_stop_signals() {
  static const std::vector<int> signals{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU};
  return signals;
}

}  // namespace phalanx
