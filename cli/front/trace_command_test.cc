// `phalanx trace analyze`: real ranks get stuck, and their files are analyzed.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;

class TraceAnalyzeTest : public ProgramTest {
 protected:
  TraceAnalyzeTest() {
    std::filesystem::create_directory(path("traces"));
    environment_ = {{"PHALANX_COMM_TRACE_DIR", path("traces")}};
  }

  Outcome launch(int ranks, const std::vector<std::string>& arguments,
                 std::function<bool(pid_t)> meanwhile = {}) const {
    std::vector<std::string> words{"launch", "-n", std::to_string(ranks)};
    words.insert(words.end(), flags_.begin(), flags_.end());
    words.push_back(std::filesystem::path(program()).replace_filename("stuck_worker").string());
    words.insert(words.end(), arguments.begin(), arguments.end());
    return run(words, {.environment = environment_, .meanwhile = meanwhile});
  }
  Outcome analyze(const std::string& folder = "traces") const { return run({"trace", "analyze", path(folder)}); }
  /// Runs `phalanx trace dump` while the output of another command is collected.
  static int dump(pid_t process) {
    return std::system(fmt::format("'{}' trace dump {} >/dev/null", program(), process).c_str());
  }
  std::string trace(const std::string& name) const { return contents(path("traces/" + name)); }

  /// The ranks of this test that handle SIGQUIT by now; before that it would end them.
  std::map<int, pid_t> listening_ranks() const {
    std::map<int, pid_t> ranks;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const std::string environment = contents(entry.path() / "environ");
      const auto& [variable, value] = *environment_.begin();
      if (environment.find(variable + "=" + value) == std::string::npos) continue;
      const std::string status = contents(entry.path() / "status");
      const std::size_t caught = status.find("SigCgt:"), rank = environment.find(std::string("\0RANK=", 6));
      if (caught == std::string::npos || rank == std::string::npos) continue;
      const auto signals = std::strtoull(status.c_str() + caught + 7, nullptr, 16);
      if ((signals >> (SIGQUIT - 1) & 1U) == 0) continue;
      ranks[std::atoi(environment.c_str() + rank + 6)] = static_cast<pid_t>(std::stol(name));
    }
    return ranks;
  }

  std::map<std::string, std::string> environment_;  // of the launchers; the first one identifies this test's launchers
  std::vector<std::string> flags_;                  // of the launchers
};

TEST_F(TraceAnalyzeTest, ARankThatNeverComesIsNamedAfterATimeOut) {
  const Outcome stuck = launch(2, {"absent", "1000"});
  EXPECT_EQ(stuck.status, 1);
  EXPECT_THAT(stuck.err, HasSubstr("not arrived: rank 1"));
  const Outcome found = analyze();
  EXPECT_THAT(found.out, ContainsRegex("^Rank 0 is at op [0-9]+ of group 'world', all_reduce.float32.8., "
                                       "sum., which failed after [0-9.]+ s, and rank 1 is missing: its "
                                       "last there is op [0-9]+"));
  // After the launcher's SIGTERM the rank that never came wrote its file too.
  EXPECT_THAT(found.out, HasSubstr("\n  rank 1: SIGTERM\n"));
  EXPECT_EQ(found.status, 0) << found.err;
}

// True if the rank waits in the all_reduce that the other rank never joins. Before it there is another one, and the
// creation of a group.
bool waits_in_second_all_reduce(const std::string& recorder) {
  if (recorder.empty()) return false;
  const auto written = nlohmann::json::parse(recorder);
  if (written["groups"].empty()) return false;  // not created yet
  int calls = 0;
  bool waits = false;
  for (const auto& entry : written["groups"][0]["entries"]) {
    if (entry["verb"] != "all_reduce") continue;
    ++calls;
    waits = entry["state"] == "started";
  }
  return calls == 2 && waits;
}

// True if the absent rank has finished all that the waiting one did before the operation that it waits in.
bool has_come_as_far(const std::string& absent, const std::string& waiting) {
  if (absent.empty()) return false;
  const auto mine = nlohmann::json::parse(absent), other = nlohmann::json::parse(waiting);
  if (mine["groups"].empty()) return false;
  const auto& entries = mine["groups"][0]["entries"];
  const auto is_finished = [](const auto& entry) { return entry["state"] == "finished"; };
  return entries.size() + 1 == other["groups"][0]["entries"].size() &&
         std::all_of(entries.begin(), entries.end(), is_finished);
}

TEST_F(TraceAnalyzeTest, SigQuitHasTheWaitingAndTheAbsentWriteTheirFiles) {
  launch(2, {"absent"}, [&](pid_t launcher) {
    const std::map<int, pid_t> ranks = listening_ranks();
    if (ranks.size() < 2) return false;
    if (!waits_in_second_all_reduce(trace("rank_0.json"))) {
      ::kill(ranks.at(0), SIGQUIT);
      return false;
    }
    if (!has_come_as_far(trace("rank_1.json"), trace("rank_0.json"))) {
      ::kill(ranks.at(1), SIGQUIT);
      return false;
    }
    ::kill(launcher, SIGINT);
    return true;
  });
  const Outcome found = analyze();
  EXPECT_EQ(found.status, 0) << found.err;
  EXPECT_THAT(found.out, ContainsRegex("^Rank 0 is at op [0-9]+ of group 'world', all_reduce.float32.8., "
                                       "sum., waiting for .*, and rank 1 is missing: its last there is op "));
  EXPECT_THAT(found.out, HasSubstr("\n  ranks 0, 1: SIGQUIT\n"));
}

TEST_F(TraceAnalyzeTest, DifferentCallsAreLaidSideBySide) {
  EXPECT_EQ(launch(2, {"mismatch"}).status, 1);
  const Outcome found = analyze();
  EXPECT_EQ(found.status, 0) << found.err;
  EXPECT_THAT(found.out, ContainsRegex("^The ranks do not call the same operation as op [0-9]+ of group "
                                       "'world': rank 0 called all_reduce.float32.8., sum.; rank 1 called "
                                       "all_reduce.float64.8., sum.\\."));
}

TEST_F(TraceAnalyzeTest, TheGroupThatHoldsUpTheOthersIsNamed) {
  EXPECT_EQ(launch(3, {"group", "1500"}).status, 1);
  const Outcome found = analyze();
  EXPECT_EQ(found.status, 0) << found.err;
  EXPECT_THAT(found.out, StartsWith("Rank 1 is at op 0 of group 'pair', barrier(), which failed after "));
  EXPECT_THAT(found.out, AllOf(HasSubstr("rank 2 is missing: it has issued nothing in that group"),
                               HasSubstr("\ngroup 'world' of ranks 0 to 2: op ")));
}

TEST_F(TraceAnalyzeTest, NobodyIsStuckAndBadFolders) {
  EXPECT_EQ(launch(2, {"finish"}).status, 0);
  const Outcome fine = analyze();
  EXPECT_EQ(fine.status, 0) << fine.err;
  EXPECT_THAT(fine.out, StartsWith("Nothing is stuck: all ranks have finished all operations of 1 group.\n"));

  expect_one_error(analyze("nothing"), 1, "nothing does not exist");
  // A run's folder means the files that its ranks left in it.
  write("run.json", "{}");
  expect_one_error(analyze(""), 1, "is a run's folder, and its ranks have left no flight recorder files in ");
  std::filesystem::rename(path("traces"), path("comm_traces"));
  EXPECT_EQ(analyze("").out, fine.out);
  std::filesystem::rename(path("comm_traces"), path("traces"));
  write("traces/rank_1.json", "{");
  expect_one_error(analyze(), 1, "rank_1.json is no flight recorder file");
  EXPECT_EQ(run({"trace"}).status, 2);
  EXPECT_EQ(run({"trace", "analyze"}).status, 2);
  expect_one_error(run({"trace", "analize", path("traces")}), 2, "did you mean 'analyze'?");
}

// The ranks are given no folder.
class LauncherTraceTest : public TraceAnalyzeTest {
 protected:
  LauncherTraceTest() {
    std::filesystem::create_directory(path("tmp"));
    environment_ = {{"TMPDIR", path("tmp")}};
  }
  /// The one folder of flight recorders below `name`; empty if there is none.
  std::string traces_below(const std::string& name) const {
    std::string found;
    std::error_code gone;
    for (std::filesystem::recursive_directory_iterator entry(path(name), gone), end; !gone && entry != end;
         entry.increment(gone)) {
      if (!entry->path().filename().string().starts_with("rank_")) continue;
      const std::string folder = entry->path().parent_path().string();
      EXPECT_TRUE(found.empty() || found == folder) << found << " and " << folder;
      found = folder;
    }
    return found;
  }
};

TEST_F(LauncherTraceTest, SigQuitToTheLauncherHasAllRanksWriteWhereTheLogFilesGoOrIntoATemporaryFolder) {
  for (const char* where : {"tmp", "logs"}) {
    if (std::string(where) == "logs") flags_ = {"--log-dir", path("logs")};
    launch(2, {"absent"}, [&](pid_t launcher) {
      if (listening_ranks().size() < 2) return false;
      const std::string folder = traces_below(where);
      if (folder.empty() || !waits_in_second_all_reduce(contents(folder + "/rank_0.json")) ||
          !has_come_as_far(contents(folder + "/rank_1.json"), contents(folder + "/rank_0.json"))) {
        ::kill(launcher, SIGQUIT);
        return false;
      }
      ::kill(launcher, SIGINT);
      return true;
    });
    const std::string folder = traces_below(where);
    EXPECT_THAT(folder, ::testing::MatchesRegex(std::string(where) == "logs"
                                                    ? path("logs") + "/none_[^/]*/attempt_0/comm_traces"
                                                    : path("tmp") + "/phalanx_traces_none_[0-9a-f]*/attempt_0"));
    const Outcome found = run({"trace", "analyze", folder});
    EXPECT_EQ(found.status, 0) << found.err;
    EXPECT_THAT(found.out, ContainsRegex("^Rank 0 is at op [0-9]+ of group 'world', all_reduce.float32.8., "
                                         "sum., waiting for .*, and rank 1 is missing: its last there is "));
  }
}

TEST_F(LauncherTraceTest, ATimeOutIsWrittenAndTheReportSaysWhere) {
  const Outcome stuck = launch(2, {"absent", "1000"});
  EXPECT_EQ(stuck.status, 1);
  const std::string folder = traces_below("tmp");
  EXPECT_THAT(stuck.err,
              EndsWith("\nthe last operations of this node's ranks: phalanx trace analyze " + folder + "\n"));
  const Outcome found = run({"trace", "analyze", folder});
  EXPECT_EQ(found.status, 0) << found.err;
  EXPECT_THAT(found.out, AllOf(HasSubstr("and rank 1 is missing"), HasSubstr("\n  rank 1: SIGTERM\n")));
}

TEST_F(LauncherTraceTest, NothingIsLeftOfAJobThatEndsWellOrIsStopped) {
  EXPECT_EQ(launch(2, {"finish"}).status, 0);
  EXPECT_TRUE(std::filesystem::is_empty(path("tmp")));
  const Outcome stopped = launch(2, {"absent"}, [&](pid_t launcher) {
    if (listening_ranks().size() < 2) return false;
    ::kill(launcher, SIGTERM);
    return true;
  });
  EXPECT_EQ(stopped.status, 128 + SIGTERM);
  EXPECT_THAT(stopped.err, HasSubstr("the last operations are in " + path("tmp/phalanx_traces_none_")));
  EXPECT_TRUE(std::filesystem::is_empty(path("tmp")));
}

TEST_F(TraceAnalyzeTest, ADumpIsRefusedWhereItWouldEndTheProcess) {
  const pid_t other = ::fork();
  if (other == 0) {
    ::signal(SIGQUIT, SIG_DFL);
    for (;;) ::pause();
  }
  expect_one_error(run({"trace", "dump", std::to_string(other)}), 1, "does not handle SIGQUIT, which would end it");
  ::kill(other, SIGKILL);
  ::waitpid(other, nullptr, 0);
  expect_one_error(run({"trace", "dump", std::to_string(other)}), 1, "there is none of that number");
  for (const char* wrong : {"job", "0", "-1", "12x"})
    expect_one_error(run({"trace", "dump", wrong}), 2, fmt::format("'{}' is no process", wrong));
  EXPECT_EQ(run({"trace", "dump"}).status, 2);
}

TEST_F(TraceAnalyzeTest, TrainingWritesOnADumpAndWhenARankDies) {
  const std::string file = config("[comm]\nsave_traces_file_prefix = \"r\"\ntrace_buf_size = 16\n");
  const Outcome outcome = run({"train", "-n", "2", file, "--training.steps=1000000", "--checkpoint.no-enable"},
                              {.environment = {{"PHALANX_COMM_TRACE_DIR", path("traces")}}, .meanwhile = [&](pid_t) {
                                 const std::map<int, pid_t> ranks = listening_ranks();
                                 if (ranks.size() < 2 || count(contents(path("run/metrics.jsonl")), "\n") < 8)
                                   return false;
                                 if (trace("r0.json").empty()) {
                                   EXPECT_EQ(dump(ranks.at(0)), 0);
                                   return false;
                                 }
                                 EXPECT_EQ(nlohmann::json::parse(trace("r0.json"))["reason"], "SIGQUIT");
                                 ::kill(ranks.at(1), SIGKILL);
                                 return true;
                               }});
  EXPECT_NE(outcome.status, 0);
  const auto written = nlohmann::json::parse(trace("r0.json"));
  EXPECT_THAT(written["reason"].get<std::string>(), HasSubstr("rank 1 has died"));
  EXPECT_EQ(written["groups"][0]["entries"].size(), 16U);  // the last 16 of more
  expect_one_error(analyze(), 1, "rank 1 of the job left no file");
}

}  // namespace
}  // namespace phalanx::cli
