#include "phalanx/launch/supervisor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/launch/child_process.h"

namespace phalanx {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using TestClock = std::chrono::steady_clock;

std::string test_program() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "launch_test_program").string();
}

// A launcher in a process of its own, its output collected.
class RunningLauncher {
 public:
  RunningLauncher(int ranks, std::vector<std::string> command) : folder_("launcher-test") {
    const UniqueFd out(open(path("stdout").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const UniqueFd err(open(path("stderr").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    ChildSpec spec;
    spec.command = {test_program(), "supervise", std::to_string(ranks)};
    spec.command.insert(spec.command.end(), command.begin(), command.end());
    spec.environment = current_environment();
    for (const char* name : {"OMP_NUM_THREADS", "RANK", "WORLD_SIZE"}) spec.environment.erase(name);
    spec.stdout_fd = out.get();
    spec.stderr_fd = err.get();
    sigemptyset(&spec.signal_mask);
    pid_ = spawn_child(spec);
  }
  ~RunningLauncher() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  void send(int signal) const { kill(pid_, signal); }
  /// The exit status, 128 + signal where it was killed.
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string out() const { return read("stdout"); }
  std::string err() const { return read("stderr"); }

 private:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  std::string read(const std::string& name) const {
    std::ifstream file(path(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  TempDirectory folder_;
  pid_t pid_ = -1;
};

// True once the condition holds; false after 30 s.
bool comes_true(const std::function<bool()>& condition) {
  const auto deadline = TestClock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (TestClock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// Gone, or dead and only not yet collected by whoever adopted it.
bool is_gone(pid_t pid) {
  std::ifstream stat(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(stat, line)) return true;
  const auto name_end = line.rfind(')');
  return name_end != std::string::npos && name_end + 2 < line.size() && line[name_end + 2] == 'Z';
}

pid_t noted_pid(const TempDirectory& folder, const std::string& name) {
  const auto path = folder.path() / name;
  EXPECT_TRUE(comes_true([&] { return std::filesystem::exists(path); })) << path;
  pid_t pid = -1;
  std::ifstream(path) >> pid;
  return pid;
}

TEST(SupervisorTest, RanksGetTheirPlaceAndTheirLinesArePrefixed) {
  RunningLauncher launcher(3, {test_program(), "print"});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  const int threads = std::max(1, usable_cores() / 3);
  EXPECT_THAT(launcher.out(), HasSubstr(fmt::format("out 0 of 3, local 0 of 3, OMP_NUM_THREADS {}\n", threads)));
  EXPECT_THAT(launcher.out(), Not(HasSubstr("[0]")));
  EXPECT_THAT(launcher.out(), HasSubstr(fmt::format("[2] out 2 of 3, local 2 of 3, OMP_NUM_THREADS {}\n", threads)));
  EXPECT_THAT(launcher.out(), HasSubstr("[1] unfinished\n"));
  EXPECT_THAT(launcher.err(), AllOf(HasSubstr("err 0\n"), HasSubstr("[1] err 1\n"), HasSubstr("[2] err 2\n")));
}

TEST(SupervisorTest, TheRootCauseIsToldOnceAndNotTheErrorsThatFollowFromIt) {
  RunningLauncher launcher(3, {test_program(), "throw", "1"});
  EXPECT_EQ(launcher.wait(), 2);
  EXPECT_EQ(launcher.err(), "launcher: rank 1: [training] steps is -1\n");
}

TEST(SupervisorTest, AReportCountsEvenIfItsRankIsStillOnItsWayOut) {
  RunningLauncher launcher(2, {test_program(), "linger", "0"});
  EXPECT_EQ(launcher.wait(), 2);
  EXPECT_EQ(launcher.err(), "launcher: rank 0: [training] steps is -1\n");
}

TEST(SupervisorTest, AnExitStatusEndsTheOthers) {
  RunningLauncher launcher(3, {test_program(), "exit", "2", "7"});
  EXPECT_EQ(launcher.wait(), 1);
  EXPECT_EQ(launcher.err(), "launcher: rank 2 ended with exit status 7\n");
}

TEST(SupervisorTest, ASignalIsNamed) {
  RunningLauncher launcher(2, {test_program(), "signal", "1", std::to_string(SIGKILL)});
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  EXPECT_THAT(launcher.err(), HasSubstr("launcher: rank 1 was killed by signal 9 (SIGKILL)"));
}

TEST(SupervisorTest, AProgramThatCannotRunIsAUsageError) {
  for (const std::string program : {"no-such-program-here", "/no/such/program"}) {
    RunningLauncher launcher(2, {program});
    EXPECT_EQ(launcher.wait(), 2);
    EXPECT_THAT(launcher.err(), HasSubstr(program));
  }
  RunningLauncher launcher(2, {"/etc/passwd"});
  EXPECT_EQ(launcher.wait(), 2);
  EXPECT_THAT(launcher.err(), HasSubstr("not executable"));
  EXPECT_THROW(supervise({.command = {"true"}, .ranks = 0}), UsageError);
}

TEST(SupervisorTest, NothingOutlivesAKilledLauncher) {
  TempDirectory notes("notes");
  RunningLauncher launcher(2, {test_program(), "stubborn", notes.path().string()});
  std::vector<pid_t> pids;
  for (const char* name : {"pid.0", "pid.1", "child.0", "child.1"}) pids.push_back(noted_pid(notes, name));
  for (const pid_t pid : pids) EXPECT_FALSE(is_gone(pid));
  launcher.send(SIGKILL);
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  for (const pid_t pid : pids) EXPECT_TRUE(comes_true([&] { return is_gone(pid); })) << pid;
}

TEST(SupervisorTest, CtrlCEndsRanksThatIgnoreItWithinTwoSeconds) {
  TempDirectory notes("notes");
  RunningLauncher launcher(2, {test_program(), "stubborn", notes.path().string()});
  std::vector<pid_t> pids;
  for (const char* name : {"pid.0", "pid.1", "child.0", "child.1"}) pids.push_back(noted_pid(notes, name));
  const auto start = TestClock::now();
  launcher.send(SIGINT);
  EXPECT_EQ(launcher.wait(), 128 + SIGINT);
  EXPECT_LT(TestClock::now() - start, std::chrono::seconds(2));
  EXPECT_EQ(launcher.err(), "");
  for (const pid_t pid : pids) EXPECT_TRUE(comes_true([&] { return is_gone(pid); })) << pid;
}

TEST(SupervisorTest, ASecondCtrlCKillsAtOnce) {
  TempDirectory notes("notes");
  RunningLauncher launcher(1, {test_program(), "graceful", notes.path().string()});
  noted_pid(notes, "pid.0");
  const auto start = TestClock::now();
  launcher.send(SIGINT);
  launcher.send(SIGTERM);  // two pending SIGINTs would be one
  EXPECT_EQ(launcher.wait(), 128 + SIGTERM);
  EXPECT_LT(TestClock::now() - start, std::chrono::seconds(2));
}

TEST(SupervisorTest, RanksThatAnnouncedAGracefulStopGetTheirTime) {
  TempDirectory notes("notes");
  RunningLauncher launcher(2, {test_program(), "graceful", notes.path().string()});
  noted_pid(notes, "pid.0");
  noted_pid(notes, "pid.1");
  launcher.send(SIGINT);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_TRUE(std::filesystem::exists(notes.path() / "saved.0"));
  EXPECT_TRUE(std::filesystem::exists(notes.path() / "saved.1"));
}

TEST(SupervisorTest, WhatARankLeavesBehindEndsWithIt) {
  TempDirectory notes("notes");
  RunningLauncher launcher(1, {test_program(), "leave-child", notes.path().string()});
  const pid_t child = noted_pid(notes, "child.0");
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_TRUE(comes_true([&] { return is_gone(child); }));
}

}  // namespace
}  // namespace phalanx
