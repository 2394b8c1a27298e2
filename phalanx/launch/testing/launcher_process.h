// Test helpers for the launcher: launchers run as separate processes, their output, and what they leave behind.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/launch/supervisor/environment_preparation.h"

namespace phalanx {

std::string test_program();

/// `launch_test_program supervise RANKS ...` in a separate process, with its output collected.
class RunningLauncher {
 public:
  struct Options {
    std::vector<std::string> before;  // a command that runs it, such as "ip netns exec NAME"
    EnvironmentMap environment;       // added to this process's environment
    int stderr_fd = -1;               // -1: collected
  };
  RunningLauncher(int ranks, std::vector<std::string> arguments)
      : RunningLauncher(ranks, std::move(arguments), Options{}) {}
  RunningLauncher(int ranks, std::vector<std::string> arguments, Options options);
  ~RunningLauncher();
  RunningLauncher(const RunningLauncher&) = delete;
  RunningLauncher& operator=(const RunningLauncher&) = delete;

  void send(int signal) const;
  /// The exit status; 128 + signal if it was killed.
  int wait();
  pid_t pid() const { return pid_; }
  std::string out() const { return read("stdout"); }
  std::string err() const { return read("stderr"); }

 private:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  std::string read(const std::string& name) const;
  TempDirectory folder_;
  pid_t pid_ = -1;
};

/// True if the process does not exist, or is a zombie that its adoptive parent has not reaped yet.
bool is_gone(pid_t pid);

/// The text that a rank wrote into the note `name`. Waits until it is there.
std::string note_of(const TempDirectory& folder, const std::string& name);
pid_t noted_pid(const TempDirectory& folder, const std::string& name);
void write_note(const TempDirectory& folder, const std::string& name);

}  // namespace phalanx
