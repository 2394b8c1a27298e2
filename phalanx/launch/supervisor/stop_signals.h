// SignalFd: the signals that a supervisor reads from a file descriptor instead of being killed by them.
//
// - If SIGHUP is ignored, as under nohup, it stays ignored, even if the caller lists it.
// - SIGPIPE is blocked and discarded. The reader of the output may have gone (a closed pipe, `| tee` after Ctrl-C);
//   that is no reason to end the ranks.
#pragma once

#include <csignal>
#include <optional>
#include <vector>

#include "phalanx/base/unique_fd.h"

namespace phalanx {

class SignalFd {
 public:
  /// Blocks `signals`, SIGCHLD, SIGUSR1, SIGUSR2 and SIGQUIT in this thread and those it starts, until it is destroyed.
  explicit SignalFd(const std::vector<int>& signals);
  ~SignalFd();
  SignalFd(const SignalFd&) = delete;
  SignalFd& operator=(const SignalFd&) = delete;
  int get() const { return fd_.get(); }
  const sigset_t& mask_before() const { return before_; }
  std::optional<int> next();

 private:
  sigset_t before_{};
  UniqueFd fd_;
};

/// SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU: they come from the user, the terminal or a batch system. SIGQUIT
/// is not among them: it makes the ranks write their flight recorders.
const std::vector<int>& default_stop_signals();

}  // namespace phalanx
