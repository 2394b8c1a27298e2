// The signals that a supervisor reads from a descriptor instead of dying from them.
//
// - SIGHUP that is ignored, as under nohup, stays ignored, also where it is asked for.
// - SIGPIPE is held back and forgotten: whoever read the output may have gone (a closed pipe, `| tee` after Ctrl-C),
//   and that is no reason to end the ranks.
#pragma once

#include <signal.h>

#include <optional>
#include <vector>

#include "phalanx/store/tcp_store_socket.h"

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

/// SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU: from the user, the terminal or a batch system. SIGQUIT is none
/// of them: it has ranks write their flight recorders.
const std::vector<int>& default_stop_signals();

}  // namespace phalanx
