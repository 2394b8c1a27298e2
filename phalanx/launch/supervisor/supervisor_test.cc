#include "phalanx/launch/supervisor/supervisor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "phalanx/base/cpu.h"
#include "phalanx/base/cpu_list.h"
#include "phalanx/base/error.h"
#include "phalanx/base/signals.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/testing/launcher_process.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using testing::MatchesRegex;
using Clock = std::chrono::steady_clock;

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::filesystem::path only_entry(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> entries;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) entries.push_back(entry.path());
  EXPECT_EQ(entries.size(), 1U) << folder;
  return entries.empty() ? folder : entries.front();
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
  EXPECT_THAT(launcher.err(),
              StartsWith(fmt::format("launcher: rank 1 (host {}, exit status 2): [training] steps is -1\n"
                                     "other failures:\n",
                                     host_name())));
  EXPECT_THAT(launcher.err(), AllOf(HasSubstr("rank 0 lost its peer"), HasSubstr("rank 2 lost its peer")));
}

TEST(SupervisorTest, AReportCountsEvenIfItsRankIsStillOnItsWayOut) {
  RunningLauncher launcher(2, {test_program(), "linger", "0"});
  EXPECT_EQ(launcher.wait(), 2);
  EXPECT_THAT(launcher.err(), StartsWith(fmt::format(
                                  "launcher: rank 0 (host {}, exit status 2): [training] steps is -1\n", host_name())));
}

TEST(SupervisorTest, AnExitStatusEndsTheOthers) {
  RunningLauncher launcher(3, {test_program(), "exit", "2", "7"});
  EXPECT_EQ(launcher.wait(), 1);
  EXPECT_EQ(launcher.err(), fmt::format("launcher: rank 2 (host {}) ended with exit status 7\n", host_name()));
}

TEST(SupervisorTest, ASignalIsNamed) {
  RunningLauncher launcher(2, {test_program(), "signal", "1", std::to_string(SIGKILL)});
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  EXPECT_THAT(launcher.err(),
              HasSubstr(fmt::format("launcher: rank 1 (host {}) was killed by signal 9 (SIGKILL)", host_name())));
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

// Repeats the measurement, at most twice, if it took 2 s or more: a pause of the machine makes it late only once.
template <class Measure>
void expect_within_two_seconds(Measure measure) {
  Clock::duration took = measure();
  for (int more = 0; more < 2 && took >= std::chrono::seconds(2); ++more) took = measure();
  EXPECT_LT(took, std::chrono::seconds(2));
}

TEST(SupervisorTest, CtrlCEndsRanksThatIgnoreItWithinTwoSeconds) {
  expect_within_two_seconds([] {
    TempDirectory notes("notes");
    RunningLauncher launcher(2, {test_program(), "stubborn", notes.path().string()});
    std::vector<pid_t> pids;
    for (const char* name : {"pid.0", "pid.1", "child.0", "child.1"}) pids.push_back(noted_pid(notes, name));
    const auto start = Clock::now();
    launcher.send(SIGINT);
    EXPECT_EQ(launcher.wait(), 128 + SIGINT);
    const auto took = Clock::now() - start;
    EXPECT_EQ(launcher.err(), "");
    for (const pid_t pid : pids) EXPECT_TRUE(comes_true([&] { return is_gone(pid); })) << pid;
    return took;
  });
}

TEST(SupervisorTest, ASecondCtrlCKillsAtOnce) {
  expect_within_two_seconds([] {
    TempDirectory notes("notes");
    RunningLauncher launcher(1, {test_program(), "graceful", notes.path().string()});
    noted_pid(notes, "pid.0");
    const auto start = Clock::now();
    launcher.send(SIGINT);
    launcher.send(SIGTERM);  // two pending SIGINTs would be one
    EXPECT_EQ(launcher.wait(), 128 + SIGTERM);
    return Clock::now() - start;
  });
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

// The shell sends SIGHUP. The kernel sends it again when the shell has gone. The end of the session sends SIGTERM.
TEST(SupervisorTest, AClosedTerminalIsOneWishToStop) {
  TempDirectory notes("notes");
  RunningLauncher launcher(2, {test_program(), "graceful", notes.path().string()});
  noted_pid(notes, "pid.0");
  noted_pid(notes, "pid.1");
  launcher.send(SIGHUP);
  for (const char* rank : {"asked.0", "asked.1"}) EXPECT_EQ(note_of(notes, rank), std::to_string(SIGHUP));
  launcher.send(SIGHUP);
  launcher.send(SIGTERM);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  for (const char* rank : {"saved.0", "saved.1"}) EXPECT_EQ(note_of(notes, rank), fmt::format("{} ", SIGTERM));
}

TEST(SupervisorTest, AClosedTerminalAfterCtrlCLosesNothingAndASecondCtrlCEndsItAll) {
  for (const int second : {SIGHUP, SIGINT}) {
    TempDirectory notes("notes");
    RunningLauncher launcher(1, {test_program(), "graceful", notes.path().string()});
    noted_pid(notes, "pid.0");
    launcher.send(SIGINT);
    EXPECT_EQ(note_of(notes, "asked.0"), std::to_string(SIGINT));
    launcher.send(second);
    EXPECT_EQ(launcher.wait(), second == SIGHUP ? 0 : 128 + SIGINT) << launcher.err();
    EXPECT_EQ(std::filesystem::exists(notes.path() / "saved.0"), second == SIGHUP);
  }
}

TEST(SupervisorTest, UnderNohupAClosedTerminalEndsNothing) {
  TempDirectory notes("notes");
  RunningLauncher launcher(2, {test_program(), "usr1", notes.path().string()}, {.before = {"nohup"}});
  const pid_t ranks[] = {noted_pid(notes, "pid.0"), noted_pid(notes, "pid.1")};
  launcher.send(SIGHUP);
  for (const pid_t rank : ranks) kill(rank, SIGHUP);
  kill(ranks[1], SIGKILL);  // a launcher that is stopping does not report it
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  EXPECT_THAT(launcher.err(), HasSubstr("rank 1 (host "));
}

TEST(SupervisorTest, RanksGoOnWhenNobodyReadsTheirOutput) {
  int output[2];
  ASSERT_EQ(pipe2(output, O_CLOEXEC), 0);
  close(output[0]);
  // Rank 0 would write there directly, and the signal would end it.
  RunningLauncher launcher(3, {"--show=1", test_program(), "print"}, {.stderr_fd = output[1]});
  close(output[1]);
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_THAT(launcher.out(), HasSubstr("[1] out 1 of 3"));
}

TEST(SupervisorTest, WhatARankLeavesBehindEndsWithIt) {
  TempDirectory notes("notes");
  RunningLauncher launcher(1, {test_program(), "leave-child", notes.path().string()});
  const pid_t child = noted_pid(notes, "child.0");
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_TRUE(comes_true([&] { return is_gone(child); }));
}

TEST(SupervisorTest, RanksGetTorchrunsVariables) {
  TempDirectory notes("notes");
  RunningLauncher launcher(2,
                           {"--id=job7",
                            "--role=trainer",
                            "--max-restarts=3",
                            "--virtual-local-rank=1",
                            test_program(),
                            "environment",
                            notes.path().string(),
                            "RANK",
                            "LOCAL_RANK",
                            "GROUP_RANK",
                            "ROLE_RANK",
                            "ROLE_NAME",
                            "LOCAL_WORLD_SIZE",
                            "WORLD_SIZE",
                            "GROUP_WORLD_SIZE",
                            "ROLE_WORLD_SIZE",
                            "MASTER_ADDR",
                            "TORCHELASTIC_RESTART_COUNT",
                            "TORCHELASTIC_MAX_RESTARTS",
                            "TORCHELASTIC_RUN_ID",
                            "TORCHELASTIC_USE_AGENT_STORE",
                            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
                            "CUDA_VISIBLE_DEVICES",
                            "PHALANX_JOB_SECRET_FILE",
                            "MASTER_PORT",
                            "TORCHELASTIC_ERROR_FILE"},
                           {.environment = {{"CUDA_VISIBLE_DEVICES", "MIG-5, MIG-3"}}});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_THAT(note_of(notes, "environment.1"),
              StartsWith("RANK=1\nLOCAL_RANK=0\nGROUP_RANK=0\nROLE_RANK=1\nROLE_NAME=trainer\nLOCAL_WORLD_SIZE=2\n"
                         "WORLD_SIZE=2\nGROUP_WORLD_SIZE=1\nROLE_WORLD_SIZE=2\nMASTER_ADDR=127.0.0.1\n"
                         "TORCHELASTIC_RESTART_COUNT=0\nTORCHELASTIC_MAX_RESTARTS=3\nTORCHELASTIC_RUN_ID=job7\n"
                         "TORCHELASTIC_USE_AGENT_STORE=False\nTORCH_NCCL_ASYNC_ERROR_HANDLING=1\n"
                         "CUDA_VISIBLE_DEVICES=MIG-3\nPHALANX_JOB_SECRET_FILE=(not set)\n"));
  EXPECT_THAT(note_of(notes, "environment.1"),
              ContainsRegex("\nMASTER_PORT=[1-9][0-9]+\nTORCHELASTIC_ERROR_FILE=/.+[.]json\n"));
}

// CUDA ignores GPUs after an invalid entry. So does a rank that must see a single GPU.
TEST(SupervisorTest, ARankThatIsToSeeOneGpuTakesNoneThatCudaWouldNot) {
  RunningLauncher launcher(2, {"--virtual-local-rank=1", test_program(), "exit", "0"},
                           {.environment = {{"CUDA_VISIBLE_DEVICES", "MIG-5,-1,MIG-3"}}});
  EXPECT_NE(launcher.wait(), 0);
  EXPECT_THAT(launcher.err(), HasSubstr("--virtual-local-rank: there is no GPU for local rank 1: CUDA_VISIBLE_DEVICES "
                                        "is 'MIG-5,-1,MIG-3', of which CUDA sees 1; start fewer ranks"));
}

TEST(SupervisorTest, ASecretIsMadeForTheJobAndTheLocalRankIsPutIntoArguments) {
  TempDirectory notes("notes");
  RunningLauncher launcher(
      2, {test_program(), "environment", notes.path().string(), "PHALANX_JOB_SECRET", "${local_rank}-${local_rank}"});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  const std::string first = note_of(notes, "environment.0"), second = note_of(notes, "environment.1");
  EXPECT_THAT(first, MatchesRegex("PHALANX_JOB_SECRET=[0-9a-f]+\n0-0=[(]not set[)]\ncpus=[0-9,-]+\n"));
  EXPECT_THAT(second, HasSubstr("\n1-1=(not set)\n"));
  EXPECT_EQ(first.substr(0, first.find('\n')), second.substr(0, second.find('\n')));
}

TEST(SupervisorTest, RanksAreBoundToTheirCpus) {
  // The first and the last CPU that this process may use.
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof mask, &mask), 0);
  std::vector<int> allowed;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &mask)) allowed.push_back(cpu);
  if (allowed.size() < 2) GTEST_SKIP() << "this process may use one CPU only";
  const std::string one = cpu_list_text({allowed.back()}), both = cpu_list_text({allowed.front(), allowed.back()});
  TempDirectory notes("notes");
  RunningLauncher launcher(
      2, {"--cpus=" + one, "--cpus=" + both, test_program(), "environment", notes.path().string(), "OMP_NUM_THREADS"});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_EQ(note_of(notes, "environment.0"), "OMP_NUM_THREADS=1\ncpus=" + one + "\n");
  EXPECT_EQ(note_of(notes, "environment.1"), "OMP_NUM_THREADS=1\ncpus=" + both + "\n");
}

TEST(SupervisorTest, AllRanksRestartAfterAFailure) {
  TempDirectory notes("notes");
  RunningLauncher launcher(2, {"--max-restarts=1", test_program(), "fail-once", notes.path().string(), "1", "7"});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  for (const char* name : {"attempt.0.0", "attempt.0.1", "attempt.1.0", "attempt.1.1"}) noted_pid(notes, name);
  EXPECT_THAT(launcher.err(), AllOf(HasSubstr("rank 1 (host "), HasSubstr("ended with exit status 7"),
                                    HasSubstr("all ranks restart (restart 1 of 1)")));
}

TEST(SupervisorTest, RestartsAreCounted) {
  RunningLauncher launcher(2, {"--max-restarts=2", test_program(), "exit", "1", "7"});
  EXPECT_EQ(launcher.wait(), 1);
  EXPECT_THAT(launcher.err(),
              AllOf(HasSubstr("restart 1 of 2"), HasSubstr("restart 2 of 2"), HasSubstr("launcher: rank 1 (host ")));
}

TEST(SupervisorTest, OutputGoesIntoFilesAndWhatIsTeedAlsoToTheConsole) {
  TempDirectory logs("logs"), notes("notes");
  RunningLauncher launcher(3, {"--id=job7", "--log-dir=" + logs.path().string(), "--redirects=0:1,1:3,2:1", "--tee=2:1",
                               "--filter=t 2 of", test_program(), "print"});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  const auto run = only_entry(logs.path());
  EXPECT_THAT(run.filename().string(), StartsWith("job7_"));
  const auto attempt = run / "attempt_0";
  const std::string line = "of 3, local 2 of 3, OMP_NUM_THREADS";
  EXPECT_THAT(contents(attempt / "0/stdout.log"), HasSubstr("out 0 of 3"));
  EXPECT_THAT(contents(attempt / "1/stderr.log"), "err 1\n");
  EXPECT_THAT(contents(attempt / "2/stdout.log"), AllOf(StartsWith("out 2 " + line), HasSubstr("\nunfinished")));
  EXPECT_THAT(contents(attempt / "filtered_stdout.log"), StartsWith("[default2]:out 2 " + line));
  EXPECT_THAT(contents(attempt / "filtered_stdout.log"), Not(HasSubstr("unfinished")));
  EXPECT_FALSE(std::filesystem::exists(attempt / "0/stderr.log"));
  EXPECT_THAT(launcher.out(), AllOf(StartsWith("[default2]:out 2 " + line), HasSubstr("[default2]:unfinished\n")));
  EXPECT_THAT(launcher.out(), AllOf(Not(HasSubstr("out 0")), Not(HasSubstr("out 1"))));
  EXPECT_THAT(launcher.err(), AllOf(HasSubstr("err 0\n"), Not(HasSubstr("err 1")), HasSubstr("[2] err 2\n")));
}

TEST(SupervisorTest, ARankThatIsNotShownStillFillsItsFiles) {
  TempDirectory logs("logs");
  RunningLauncher launcher(3, {"--log-dir=" + logs.path().string(), "--tee=0:1", "--show=1", test_program(), "print"});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_THAT(launcher.out(), AllOf(HasSubstr("[1] out 1"), Not(HasSubstr("out 0")), Not(HasSubstr("out 2"))));
  EXPECT_EQ(launcher.err(), "[1] err 1\n");
  EXPECT_THAT(contents(only_entry(logs.path()) / "attempt_0/0/stdout.log"), HasSubstr("out 0"));
}

TEST(SupervisorTest, EachAttemptHasAFolderWithTheRanksErrors) {
  TempDirectory logs("logs");
  RunningLauncher launcher(
      2, {"--max-restarts=1", "--log-dir=" + logs.path().string(), "--redirects=3", test_program(), "throw", "1"});
  EXPECT_EQ(launcher.wait(), 2);
  const auto run = only_entry(logs.path());
  for (const char* attempt : {"attempt_0", "attempt_1"})
    EXPECT_THAT(contents(run / attempt / "1/error.json"), HasSubstr("[training] steps is -1"));
  EXPECT_THAT(launcher.err(), HasSubstr("its standard error: " + (run / "attempt_1/1/stderr.log").string()));
}

TEST(SupervisorTest, AMasterPortThatIsTakenIsOneError) {
  TcpStoreServer taken;
  RunningLauncher launcher(2, {fmt::format("--master-port={}", taken.address().port), test_program(), "print"});
  EXPECT_EQ(launcher.wait(), 1);
  EXPECT_THAT(launcher.err(), HasSubstr(fmt::format("--master-port {}: the port is in use", taken.address().port)));
}

// --signals-to-handle and --shutdown-timeout: which signals end the job, and after how long the ranks are killed.
TEST(SupervisorTest, AnotherSignalMayBeTheOneThatEndsTheJobAndItsPatienceIsSet) {
  expect_within_two_seconds([] {
    TempDirectory notes("notes");
    RunningLauncher launcher(1, {fmt::format("--signal={}", SIGUSR2), "--terminate-ms=200", test_program(), "stubborn",
                                 notes.path().string()});
    const pid_t rank = noted_pid(notes, "pid.0"), child = noted_pid(notes, "child.0");
    const auto start = Clock::now();
    launcher.send(SIGUSR2);
    EXPECT_EQ(launcher.wait(), 128 + SIGUSR2);
    const auto took = Clock::now() - start;
    EXPECT_GE(took, std::chrono::milliseconds(150));
    for (const pid_t pid : {rank, child}) EXPECT_TRUE(comes_true([&] { return is_gone(pid); })) << pid;
    return took;
  });
}

TEST(SupervisorTest, ASignalThatIsNoReasonToEndIsPassedOn) {
  TempDirectory notes("notes");
  RunningLauncher launcher(2, {fmt::format("--signal={}", SIGTERM), test_program(), "usr1", notes.path().string()});
  noted_pid(notes, "pid.0");
  noted_pid(notes, "pid.1");
  launcher.send(SIGUSR1);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
}

// The signals that batch systems send before they kill.
TEST(SupervisorTest, RanksThatAnnounceItGetTheirTimeAtTheSignalsOfABatchSystem) {
  TempDirectory notes("notes");
  RunningLauncher launcher(1, {test_program(), "graceful", notes.path().string()});
  noted_pid(notes, "pid.0");
  launcher.send(SIGUSR1);
  EXPECT_EQ(note_of(notes, "asked.0"), std::to_string(SIGUSR1));
  launcher.send(SIGXCPU);  // is sent repeatedly
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_TRUE(std::filesystem::exists(notes.path() / "saved.0"));
}

TEST(SupervisorTest, ARankThatSaysThatItIsNearlyDoneIsNotWaitedForAnyLonger) {
  expect_within_two_seconds([] {
    TempDirectory notes("notes");
    RunningLauncher launcher(1, {test_program(), "nearly-done", notes.path().string()});
    noted_pid(notes, "pid.0");
    const auto start = Clock::now();
    launcher.send(SIGTERM);
    EXPECT_EQ(launcher.wait(), 128 + SIGTERM);
    return Clock::now() - start;
  });
}

// The guard is the only child of the launcher that is not a rank.
TEST(SupervisorTest, ALauncherThatIsKilledWithItsGuardLeavesAFolderThatTheNextOneRemoves) {
  TempDirectory notes("notes"), temporary("temporary");
  const RunningLauncher::Options options{.environment = {{"TMPDIR", temporary.path().string()}}};
  const auto folders = [&] {
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(temporary.path()))
      found.insert(entry.path().filename().string());
    return found;
  };
  std::set<std::string> left;
  {
    RunningLauncher killed(1, {test_program(), "hold", notes.path().string()}, options);
    const pid_t rank = noted_pid(notes, "hold.0.of.1");
    left = folders();
    EXPECT_EQ(left.size(), 1U);
    std::string children = contents(fmt::format("/proc/{0}/task/{0}/children", killed.pid()));
    std::istringstream list(children);
    for (pid_t child; list >> child;)
      if (child != rank) kill(child, SIGKILL);
    killed.send(SIGKILL);
    EXPECT_EQ(killed.wait(), 128 + SIGKILL);
    EXPECT_TRUE(comes_true([&] { return is_gone(rank); }));
  }
  EXPECT_EQ(folders(), left);
  std::filesystem::remove(notes.path() / "hold.0.of.1");
  RunningLauncher lives(1, {test_program(), "hold", notes.path().string()}, options);
  noted_pid(notes, "hold.0.of.1");
  std::set<std::string> of_one_that_lives = folders();
  EXPECT_EQ(of_one_that_lives.size(), 1U);
  EXPECT_NE(of_one_that_lives, left);
  RunningLauncher other(1, {test_program(), "print"}, options);
  EXPECT_EQ(other.wait(), 0);
  EXPECT_EQ(folders(), of_one_that_lives);
  write_note(notes, "go");
  EXPECT_EQ(lives.wait(), 0);
}

TEST(SupervisorTest, ARankThatIsStoppedWhileItEndsIsNotWaitedForForEver) {
  RunningLauncher launcher(2, {"--stopped-ms=300", test_program(), "stopped-at-end", "."});
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  EXPECT_THAT(launcher.err(), HasSubstr("rank 1 is stopped (SIGSTOP): process "));
}

// No running rank is left to report it.
TEST(SupervisorTest, AJobWhoseRanksAreAllStoppedIsSaidAndGoesOn) {
  for (const int ranks : {1, 2}) {
    TempDirectory notes("notes");
    RunningLauncher launcher(ranks, {"--stopped-ms=300", test_program(), "hold", notes.path().string()});
    std::vector<pid_t> processes;
    for (int rank = 0; rank < ranks; ++rank)
      processes.push_back(noted_pid(notes, fmt::format("hold.{}.of.{}", rank, ranks)));
    for (const pid_t process : processes) kill(process, SIGSTOP);
    const std::string who = ranks == 1 ? "rank 0 has been stopped" : "all 2 ranks here have been stopped";
    EXPECT_TRUE(comes_true([&] { return launcher.err().find(who) != std::string::npos; })) << launcher.err();
    EXPECT_THAT(launcher.err(), HasSubstr(fmt::format("`kill -CONT {}` lets it go on", fmt::join(processes, " "))));
    for (const pid_t process : processes) kill(process, SIGCONT);
    write_note(notes, "go");
    EXPECT_EQ(launcher.wait(), 0);
  }
}

// The rank has announced an hour, or nothing, and cannot receive the stop signal.
TEST(SupervisorTest, ARankThatIsStoppedIsNotWaitedForWhenTheJobIsToStop) {
  for (const char* program : {"nearly-done", "hold"}) {
    const bool is_hold = std::string(program) == "hold";
    TempDirectory notes("notes");
    RunningLauncher launcher(2, {"--terminate-ms=3600000", test_program(), program, notes.path().string()});
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < 2; ++rank)
      ranks.push_back(noted_pid(notes, is_hold ? fmt::format("hold.{}.of.2", rank) : fmt::format("pid.{}", rank)));
    kill(ranks[1], SIGSTOP);
    // A SIGTERM that arrives before the rank is stopped is handled first, and ends it.
    ASSERT_TRUE(comes_true([&] { return is_stopped(ranks[1]); }));
    launcher.send(SIGTERM);
    EXPECT_EQ(launcher.wait(), 128 + SIGTERM);
    EXPECT_THAT(launcher.err(),
                ContainsRegex(fmt::format("rank 1 is stopped \\(SIGSTOP\\): process {} has stood still for "
                                          "[0-9.]+ s while the job is to stop: it is killed",
                                          ranks[1])));
    EXPECT_THAT(launcher.err(), HasSubstr("stopped by signal 15 (SIGTERM), and not all ranks have ended well"));
  }
}

TEST(SupervisorTest, QuitThatNobodyHandlesIsSaid) {
  TempDirectory notes("notes");
  RunningLauncher launcher(1, {test_program(), "hold", notes.path().string()});
  noted_pid(notes, "hold.0.of.1");
  launcher.send(SIGQUIT);
  EXPECT_TRUE(comes_true([&] { return launcher.err().find("SIGQUIT: no rank here handles it") != std::string::npos; }));
  write_note(notes, "go");
  EXPECT_EQ(launcher.wait(), 0);
}

TEST(SupervisorTest, QuitGoesToThoseWhoHandleItAndEndsNobody) {
  TempDirectory notes("notes");
  RunningLauncher launcher(2, {test_program(), "quit", notes.path().string()});
  const pid_t deaf = noted_pid(notes, "pid.0");
  noted_pid(notes, "pid.1");
  launcher.send(SIGQUIT);
  note_of(notes, "quit.1");
  EXPECT_FALSE(is_gone(deaf));
  launcher.send(SIGTERM);
  EXPECT_EQ(launcher.wait(), 128 + SIGTERM) << launcher.err();
}

}  // namespace
}  // namespace phalanx
