// Starts processes that cannot outlive the process that starts them.
//
// spawn_child(): the child leads its own process group, so that it and its children can be signalled together. The
// kernel kills the child when the thread that spawned it ends, for whatever reason. Call it from a thread that lives as
// long as the child should.
//
// ProcessGuard: a small process that kills the registered process groups and removes a folder if its owner is killed
// (SIGKILL). It covers the children of children, which the kernel's signal does not reach.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <string>
#include <vector>

#include "phalanx/base/unique_fd.h"
#include "phalanx/launch/supervisor/environment_preparation.h"

namespace phalanx {

struct ChildSpec {
  std::vector<std::string> command;  // the program is searched in PATH unless it has a slash
  EnvironmentMap environment;
  int stdin_fd = -1;  // -1: inherited
  int stdout_fd = -1;
  int stderr_fd = -1;
  sigset_t signal_mask{};  // of the child
  std::vector<int> cpus;   // CPUs that the child may use; empty: those of this process
};

/// Throws UsageError if the program does not exist or is not executable, and Error if no process can be started.
pid_t spawn_child(const ChildSpec& spec);

class ProcessGuard {
 public:
  /// Starts the guard process. If the owner vanishes, the guard removes `folder` with its contents; empty: no folder.
  explicit ProcessGuard(const std::string& folder);
  ~ProcessGuard();  // ends the guard process, which kills the groups that are still watched
  ProcessGuard(const ProcessGuard&) = delete;
  ProcessGuard& operator=(const ProcessGuard&) = delete;

  void watch(pid_t group);
  /// REQUIRES: the group's leader is not reaped yet, so the system cannot have reused its pid.
  void release(pid_t group);

 private:
  void send(pid_t message);
  pid_t pid_ = -1;
  UniqueFd pipe_;
};

}  // namespace phalanx
