// Starting processes that cannot outlive the one that starts them.
//
// spawn_child(): the child leads a process group of its own (so that it and its children can be signalled together) and
// is killed by the kernel when the thread that spawned it ends, however that happens. Call it from a thread that lives
// as long as the child should.
//
// ProcessGuard: a tiny process that kills the groups it was told of, and removes a folder, when its owner vanishes
// without a word (SIGKILL): it covers the children of children, which the kernel's signal does not reach.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "phalanx/launch/supervisor/environment_preparation.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

struct ChildSpec {
  std::vector<std::string> command;  // the program is looked for in PATH unless it has a slash
  EnvironmentMap environment;
  int stdin_fd = -1;  // -1: inherited
  int stdout_fd = -1;
  int stderr_fd = -1;
  sigset_t signal_mask{};  // of the child
  std::vector<int> cpus;   // that it may run on; empty: those of this process
};

/// Throws UsageError if the program does not exist or is not executable, Error if no process can be made.
pid_t spawn_child(const ChildSpec& spec);

class ProcessGuard {
 public:
  /// Starts the guard. `folder` is removed with all it holds if the owner vanishes; empty: none.
  explicit ProcessGuard(const std::string& folder);
  ~ProcessGuard();  // ends it; groups still watched are killed
  ProcessGuard(const ProcessGuard&) = delete;
  ProcessGuard& operator=(const ProcessGuard&) = delete;

  void watch(pid_t group);
  void release(pid_t group);  // before the group's leader is reaped, so that its number cannot be another's

 private:
  void send(pid_t message);
  pid_t pid_ = -1;
  UniqueFd pipe_;
};

}  // namespace phalanx
