#include "phalanx/launch/testing/launcher_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "phalanx/base/testing/comes_true.h"
#include "phalanx/launch/supervisor/child_process.h"

namespace phalanx {

std::string test_program() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "launch_test_program").string();
}

RunningLauncher::RunningLauncher(int ranks, std::vector<std::string> arguments, Options options)
    : folder_("launcher-test") {
  const UniqueFd out(open(path("stdout").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  const UniqueFd err(open(path("stderr").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  ChildSpec spec;
  spec.command = std::move(options.before);
  for (std::string& word : std::vector<std::string>{test_program(), "supervise", std::to_string(ranks)})
    spec.command.push_back(std::move(word));
  spec.command.insert(spec.command.end(), arguments.begin(), arguments.end());
  spec.environment = current_environment();
  std::erase_if(spec.environment, [](const auto& entry) {
    const auto& name = entry.first;
    return name == "OMP_NUM_THREADS" || name == "RANK" || name == "WORLD_SIZE" || name.starts_with("PHALANX_");
  });
  spec.environment["PHALANX_COMM_TRACE_DIR"] = path("traces");
  for (const auto& [name, value] : options.environment) spec.environment[name] = value;
  spec.stdout_fd = out.get();
  spec.stderr_fd = options.stderr_fd >= 0 ? options.stderr_fd : err.get();
  sigemptyset(&spec.signal_mask);
  pid_ = spawn_child(spec);
}

RunningLauncher::~RunningLauncher() {
  if (pid_ <= 0) return;
  kill(pid_, SIGCONT);
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void RunningLauncher::send(int signal) const { kill(pid_, signal); }

int RunningLauncher::wait() {
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::string RunningLauncher::read(const std::string& name) const {
  std::ifstream file(path(name));
  return {std::istreambuf_iterator<char>(file), {}};
}

bool is_gone(pid_t pid) {
  std::ifstream stat(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(stat, line)) return true;
  const auto name_end = line.rfind(')');
  return name_end != std::string::npos && name_end + 2 < line.size() && line[name_end + 2] == 'Z';
}

std::string note_of(const TempDirectory& folder, const std::string& name) {
  const auto path = folder.path() / name;
  EXPECT_TRUE(comes_true([&] { return std::filesystem::exists(path); })) << path;
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

pid_t noted_pid(const TempDirectory& folder, const std::string& name) {
  const std::string text = note_of(folder, name);
  return text.empty() ? -1 : std::stoi(text);
}

void write_note(const TempDirectory& folder, const std::string& name) { std::ofstream(folder.path() / name) << "1"; }

}  // namespace phalanx
