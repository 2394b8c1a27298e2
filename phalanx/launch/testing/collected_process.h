// Test helpers for init_from_environment(): programs run as separate processes, with their output collected.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/under_sanitizer.h"
#include "phalanx/launch/supervisor/child_process.h"

namespace phalanx {

inline std::string built_program(const std::string& name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}

// This process's environment without variables that a launcher of the tests may have set.
inline EnvironmentMap clean_environment() {
  EnvironmentMap result = current_environment();
  std::erase_if(result, [](const auto& entry) {
    const auto& name = entry.first;
    return name == "RANK" || name == "WORLD_SIZE" || name.starts_with("LOCAL_") || name.starts_with("MASTER_") ||
           name.starts_with("TORCHELASTIC_") || name.starts_with("PHALANX_") || name.starts_with("OMPI_") ||
           name.starts_with("PMI") || (name.starts_with("SLURM_") && name != "SLURM_CONF");
  });
  result["OMP_NUM_THREADS"] = "1";
  static const TempDirectory traces("traces");  // flight recorders of ranks that fail on purpose
  result["PHALANX_COMM_TRACE_DIR"] = traces.path().string();
  return result;
}

/// How often `part` occurs in `text`.
inline int times_in(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++found;
  return found;
}

/// The program's path, searched in `folders` and in PATH; empty if it is not found.
inline std::string find_program(const std::string& name, std::vector<std::filesystem::path> folders = {}) {
  const std::string path = current_environment()["PATH"];
  for (std::size_t begin = 0; begin < path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    folders.emplace_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  for (const auto& folder : folders)
    if (access((folder / name).c_str(), X_OK) == 0) return (folder / name).string();
  return "";
}

inline std::string worker() { return built_program("launch_test_worker"); }

inline void expect_sum_of_ranks(const std::string& output, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) EXPECT_THAT(output, HasSubstr(fmt::format("rank {} of {}, ", rank, ranks)));
  EXPECT_THAT(output, HasSubstr(fmt::format("sum {}\n", ranks * (ranks + 1) / 2)));
}

// How long ranks of a test wait for each other.
inline constexpr std::chrono::milliseconds kStartLimit = kSlowdown * std::chrono::seconds(20);

// A process whose output is collected. The destructor kills its process group.
class CollectedProcess {
 public:
  explicit CollectedProcess(std::vector<std::string> command, EnvironmentMap environment = clean_environment())
      : folder_("process") {
    const UniqueFd out(open((folder_.path() / "out").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    ChildSpec spec;
    spec.command = std::move(command);
    spec.environment = std::move(environment);
    spec.stdout_fd = spec.stderr_fd = out.get();
    sigemptyset(&spec.signal_mask);
    pid_ = spawn_child(spec);
  }
  ~CollectedProcess() {
    if (pid_ <= 0) return;
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string output() const {
    std::ifstream file(folder_.path() / "out");
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  TempDirectory folder_;
  pid_t pid_ = -1;
};

}  // namespace phalanx
