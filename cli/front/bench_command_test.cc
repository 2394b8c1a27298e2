// Runs `phalanx bench comm` and `phalanx doctor --topology` like a user.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/bench_arguments.h"
#include "cli/testing/program_fixture.h"
#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;

class BenchProgram : public ProgramTest {
 protected:
  /// The program gets SIGINT when its output contains the text.
  Outcome run_interrupted_at(const std::string& text, const std::vector<std::string>& words) const {
    return run(words, {.meanwhile = [&](pid_t program) {
                 if (count(contents(path("stdout.txt")), text) == 0) return false;
                 return ::kill(program, SIGINT) == 0;
               }});
  }
};

TEST_F(BenchProgram, MeasuresEveryVerbOnSeveralBackendsAndWritesTheFiles) {
  const Outcome ended = run({"bench",    "comm",        "-n",         "2",
                             "--ops",    "all",         "--backends", "shm,symmetric,heap,gloo,local,c10d",
                             "--sizes",  "64K",         "--iters",    "3",
                             "--rounds", "1",           "--place",    "both",
                             "--csv",    path("a.csv"), "--json",     path("a.json"),
                             "--plot",   path("a.svg")});
  ASSERT_EQ(ended.status, 0) << ended.out << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("2 ranks on "), HasSubstr("busbw"), HasSubstr("\npingpong")));
  const auto json = nlohmann::json::parse(contents(path("a.json")));
  EXPECT_EQ(json["stopped"], false);
  // 11 verbs, four of them both in-place and out-of-place, on 6 backends.
  ASSERT_EQ(json["rows"].size(), 15U * 6U) << ended.out;
  for (const auto& row : json["rows"]) {
    EXPECT_EQ(row["wrong"], 0) << row;
    EXPECT_GT(row["p50_us"], 0) << row;
    EXPECT_GT(row["times_c10d"], 0) << row;
  }
  EXPECT_THAT(contents(path("a.csv")), HasSubstr("\nbarrier,0,"));
  EXPECT_THAT(contents(path("a.svg")), AllOf(HasSubstr("</svg>"), HasSubstr("gloo in place")));
}

TEST_F(BenchProgram, RunsUnderALauncherAndSaysWhatTorchCannot) {
  const Outcome ended = run({"launch", "-n",         "2",       "--",      program(),    "bench",     "comm",
                             "--ops",  "all_reduce", "--sizes", "1K",      "--backends", "auto,c10d", "-o",
                             "avg",    "-d",         "half",    "--iters", "2",          "--rounds",  "1"});
  ASSERT_EQ(ended.status, 0) << ended.out << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("float16  avg     shm"),
                               HasSubstr("# c10d left out for all_reduce of float16, avg: c10d's gloo has no avg")));
}

TEST_F(BenchProgram, AnInterruptPrintsAndWritesWhatThereIs) {
  // Enough cases to take minutes.
  const Outcome ended = run_interrupted_at("\nall_reduce ", {"bench",    "comm",
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
                                                             "--csv",    path("a.csv")});
  EXPECT_EQ(ended.status, 0) << ended.out << ended.err;
  const int rows = count(ended.out, "\nall_reduce ");
  EXPECT_GE(rows, 1);
  EXPECT_LT(rows, 100000);
  EXPECT_THAT(ended.out,
              HasSubstr(fmt::format("# stopped by a signal: {} row{} measured\n", rows, rows == 1 ? "" : "s")));
  const auto json = nlohmann::json::parse(contents(path("a.json")));
  EXPECT_EQ(json["stopped"], true);
  ASSERT_EQ(static_cast<int>(json["rows"].size()), rows);
  EXPECT_EQ(json["rows"][0]["bytes"], 8);  // one element per rank
  EXPECT_GT(json["rows"][0]["p50_us"], 0);
  EXPECT_EQ(count(contents(path("a.csv")), "\nall_reduce,"), rows);
}

TEST_F(BenchProgram, WrongCommandLinesEndWithStatus2AndOneMessage) {
  const auto expect = [&](const std::vector<std::string>& more, const std::string& text) {
    std::vector<std::string> words{"bench"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome ended = run(words);
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
  const Outcome no_folder = run({"bench", "comm", "--ops", "barrier", "--json", path("none/a.json")});
  EXPECT_EQ(no_folder.status, 1);
  EXPECT_THAT(no_folder.err, HasSubstr("none/a.json"));
}

TEST_F(BenchProgram, HelpIsPrintedByEachWord) {
  EXPECT_THAT(run({"bench", "--help"}).out, HasSubstr("usage: phalanx bench comm"));
  EXPECT_THAT(run({"bench", "comm", "--help"}).out, HasSubstr("usage: phalanx bench comm"));
  EXPECT_EQ(run({"bench"}).status, 2);
}

TEST_F(BenchProgram, DoctorTellsTheTopology) {
  const Outcome facts = run({"doctor", "--topology", "--no-measure"});
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
