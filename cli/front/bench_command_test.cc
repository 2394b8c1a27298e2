// Runs `phalanx bench comm` and `phalanx doctor --topology` like a user.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/bench_arguments.h"
#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"

namespace phalanx::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string text_of_file(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

struct Ended {
  int status = -1;
  std::string out, err;
};

class BenchProgram : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }

  /// interrupt_at: the program gets SIGINT when its output contains this text.
  Ended run(std::vector<std::string> words, const std::string& interrupt_at = "") const {
    const auto bin = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    words.insert(words.begin(), (bin / "phalanx").string());
    int out[2];
    if (::pipe2(out, O_CLOEXEC) != 0) return {};
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(100);  // ends a hanging test, with its ranks
      ::setpgid(0, 0);
      ::dup2(out[1], STDOUT_FILENO);
      ::dup2(::open(path("err").c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDERR_FILENO);
      for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PHALANX_STORE"})
        ::unsetenv(name);
      std::vector<char*> argv;
      for (std::string& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(out[1]);
    Ended ended;
    bool interrupted = interrupt_at.empty();
    char buffer[4096];
    for (ssize_t bytes; (bytes = ::read(out[0], buffer, sizeof buffer)) > 0;) {
      ended.out.append(buffer, static_cast<std::size_t>(bytes));
      if (!interrupted && ended.out.find(interrupt_at) != std::string::npos) {
        interrupted = true;
        ::kill(child, SIGINT);
      }
    }
    ::close(out[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
    ended.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    ended.err = text_of_file(path("err"));
    return ended;
  }

 private:
  TempDirectory folder_{"bench-test"};
};

TEST_F(BenchProgram, MeasuresEveryVerbOnSeveralBackendsAndWritesTheFiles) {
  const Ended ended = run({"bench",    "comm",        "-n",         "2",
                           "--ops",    "all",         "--backends", "shm,symmetric,heap,gloo,local,c10d",
                           "--sizes",  "64K",         "--iters",    "3",
                           "--rounds", "1",           "--place",    "both",
                           "--csv",    path("a.csv"), "--json",     path("a.json"),
                           "--plot",   path("a.svg")});
  ASSERT_EQ(ended.status, 0) << ended.out << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("2 ranks on "), HasSubstr("busbw"), HasSubstr("\npingpong")));
  const auto json = nlohmann::json::parse(text_of_file(path("a.json")));
  EXPECT_EQ(json["stopped"], false);
  // 11 verbs, four of them both in-place and out-of-place, on 6 backends.
  ASSERT_EQ(json["rows"].size(), 15U * 6U) << ended.out;
  for (const auto& row : json["rows"]) {
    EXPECT_EQ(row["wrong"], 0) << row;
    EXPECT_GT(row["p50_us"], 0) << row;
    EXPECT_GT(row["times_c10d"], 0) << row;
  }
  EXPECT_THAT(text_of_file(path("a.csv")), HasSubstr("\nbarrier,0,"));
  EXPECT_THAT(text_of_file(path("a.svg")), AllOf(HasSubstr("</svg>"), HasSubstr("gloo in place")));
}

TEST_F(BenchProgram, RunsUnderALauncherAndSaysWhatTorchCannot) {
  const std::string program = (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "phalanx").string();
  const Ended ended =
      run({"launch",     "-n",        "2",  "--",  program, "bench", "comm",    "--ops", "all_reduce", "--sizes", "1K",
           "--backends", "auto,c10d", "-o", "avg", "-d",    "half",  "--iters", "2",     "--rounds",   "1"});
  ASSERT_EQ(ended.status, 0) << ended.out << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("float16  avg     shm"),
                               HasSubstr("# c10d left out for all_reduce of float16, avg: c10d's gloo has no avg")));
}

TEST_F(BenchProgram, AnInterruptPrintsAndWritesWhatThereIs) {
  // Enough cases to take minutes.
  const Ended ended = run({"bench",    "comm",
                           "-n",       "2",
                           "--ops",    "all_reduce",
                           "-b",       "4",
                           "-e",       "36000",
                           "-i",       "4",
                           "-d",       "float,double,half,int32",
                           "-o",       "sum,min,max,prod",
                           "--iters",  "5",
                           "--rounds", "2",
                           "--copy",   "0",
                           "--json",   path("a.json"),
                           "--csv",    path("a.csv")},
                          "\nall_reduce ");
  EXPECT_EQ(ended.status, 0) << ended.out << ended.err;
  const auto count = [](const std::string& text, const std::string& part) {
    std::size_t found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  };
  const std::size_t rows = count(ended.out, "\nall_reduce ");
  EXPECT_GE(rows, 1U);
  EXPECT_LT(rows, 100000U);
  EXPECT_THAT(ended.out,
              HasSubstr(fmt::format("# stopped by a signal: {} row{} measured\n", rows, rows == 1 ? "" : "s")));
  const auto json = nlohmann::json::parse(text_of_file(path("a.json")));
  EXPECT_EQ(json["stopped"], true);
  ASSERT_EQ(json["rows"].size(), rows);
  EXPECT_EQ(json["rows"][0]["bytes"], 8);  // one element per rank
  EXPECT_GT(json["rows"][0]["p50_us"], 0);
  EXPECT_EQ(count(text_of_file(path("a.csv")), "\nall_reduce,"), rows);
}

TEST_F(BenchProgram, WrongCommandLinesEndWithStatus2AndOneMessage) {
  const auto expect = [&](const std::vector<std::string>& more, const std::string& text) {
    std::vector<std::string> words{"bench"};
    words.insert(words.end(), more.begin(), more.end());
    const Ended ended = run(words);
    EXPECT_EQ(ended.status, 2) << ended.err;
    EXPECT_THAT(ended.err, HasSubstr(text));
    EXPECT_EQ(ended.err.find("phalanx bench: "), ended.err.rfind("phalanx bench: ")) << ended.err;
  };
  expect({"com"}, "unknown subcommand 'com' (did you mean 'comm'?): expected comm, train");
  expect({"comm", "--ops", "allreduce"}, "did you mean 'all_reduce'?");
  expect({"comm", "--sizes", "4Q"}, "--sizes: '4Q' is no size");
  expect({"comm", "--min-bytes", "1M", "--max-bytes", "1K"}, "sizes from 1048576 to 1024");
  expect({"comm", "-n", "0"}, "-n is '0'");
  expect({"comm", "--bogus"}, "--bogus");
  expect({"comm", "-n", "1"}, "pingpong and sendrecv need two ranks");
  expect({"comm", "--backends", "shm,smh", "--ops", "barrier"}, "backend 'smh' (did you mean 'shm'?)");
  expect({"comm", "--backends", "smh", "--ops", "barrier"}, "backend 'smh'");
  const Ended no_folder = run({"bench", "comm", "--ops", "barrier", "--json", path("none/a.json")});
  EXPECT_EQ(no_folder.status, 1);
  EXPECT_THAT(no_folder.err, HasSubstr("none/a.json"));
}

TEST_F(BenchProgram, HelpIsPrintedByEachWord) {
  EXPECT_THAT(run({"bench", "--help"}).out, HasSubstr("usage: phalanx bench comm"));
  EXPECT_THAT(run({"bench", "comm", "--help"}).out, HasSubstr("usage: phalanx bench comm"));
  EXPECT_EQ(run({"bench"}).status, 2);
}

TEST_F(BenchProgram, DoctorTellsTheTopology) {
  const Ended facts = run({"doctor", "--topology", "--no-measure"});
  EXPECT_EQ(facts.status, 0) << facts.err;
  EXPECT_THAT(facts.out, AllOf(HasSubstr("Processors\n"), HasSubstr("NUMA nodes\n"), HasSubstr("Network\n"),
                               HasSubstr("  lo "), HasSubstr("GPUs\n"), Not(HasSubstr("Measured"))));
  EXPECT_EQ(run({"doctor", "--topology", "--bogus"}).status, 2);
  EXPECT_THAT(run({"doctor", "--help"}).out, HasSubstr("--topology"));
}

TEST(BenchArguments, NcclTestsSpellingsAreKnown) {
  const auto parsed = parse_bench_arguments(
      {"-b", "8", "-e", "128", "-f", "2", "-d", "half", "-o", "max", "-c", "0", "--warmup_iters=9", "--pin"});
  EXPECT_THAT(parsed.options.sizes, ElementsAre(8, 16, 32, 64, 128));
  EXPECT_EQ(parsed.options.warmup, 9);
  EXPECT_THAT(parsed.options.types, ElementsAre(DataType::f16));
  EXPECT_THAT(parsed.options.ops, ElementsAre(ReduceOp::max));
  EXPECT_FALSE(parsed.options.check);
  EXPECT_TRUE(parsed.options.pin);
  EXPECT_FALSE(parse_bench_arguments({"--pin", "0"}).options.pin);
  EXPECT_TRUE(parse_bench_arguments({"--pin", "1"}).options.pin);
  EXPECT_THAT(parse_bench_arguments({"--minbytes", "1K", "--maxbytes", "3K", "--stepbytes", "1K"}).options.sizes,
              ElementsAre(1024, 2048, 3072));
  EXPECT_EQ(parse_bench_arguments({}).options.sizes.size(), 8U);
  EXPECT_THROW(parse_bench_arguments({"-f", "2", "-i", "8"}), UsageError);
  EXPECT_THROW(parse_bench_arguments({"--iters", "0"}), UsageError);
}

}  // namespace
}  // namespace phalanx::cli
