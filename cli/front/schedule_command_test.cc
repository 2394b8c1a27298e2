#include "cli/front/schedule_command.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/front/trace_command.h"
#include "cli/testing/command_fixture.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/observe/trace.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/simulate.h"

namespace phalanx::cli {
namespace {

class ScheduleCommandTest : public CommandTest {
 protected:
  ScheduleCommandTest() : CommandTest({"schedule", "", kScheduleHelp, schedule_command}) {}
};

TEST_F(ScheduleCommandTest, TableBubbleAndMemory) {
  ASSERT_EQ(run({"1f1b", "--ranks", "2", "--micro-batches=2", "--table"}), 0) << error_;
  EXPECT_EQ(out_,
            "        Rank 0 Rank 1\n"
            "Step 0: 0F0\n"
            "Step 1: 0F1    1F0\n"
            "Step 2:        1B0\n"
            "Step 3: 0B0    1F1\n"
            "Step 4:        1B1\n"
            "Step 5: 0B1\n"
            "\n"
            "1F1B: 2 ranks, 2 stages, 2 micro-batches; F=1 B=2 I=1 W=1 send=0\n"
            "\n"
            "rank  stages       busy    waits   live at most\n"
            "   0  0               6   33.3 %              2\n"
            "   1  1               6   33.3 %              1\n"
            "\n"
            "makespan 9, bubble 33.3 %\n");
  EXPECT_EQ(error_, "");

  ASSERT_EQ(run({"ZBV", "--ranks", "4", "--micro-batches", "8"}), 0) << error_;
  EXPECT_THAT(out_, AllOf(StartsWith("ZBVZeroBubble: 4 ranks, 8 stages, 8 micro-batches"), HasSubstr("\n   1  1 6  "),
                          HasSubstr("bubble 5.9 % (0.0 % between a rank's first pass and its last)\n")));
  ASSERT_EQ(run({"Interleaved", "--ranks", "2", "--micro-batches", "4", "--stages-per-rank", "3"}), 0) << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("6 stages"), HasSubstr("0 2 4"), HasSubstr("bubble 7.7 %\n")));  // 1 / (3 * 4 + 1)
}

TEST_F(ScheduleCommandTest, TimesAreTakenAndCompleted) {
  const auto times = [&](const std::string& text) {
    EXPECT_EQ(run({"GPipe", "--ranks", "2", "--micro-batches", "2", "--times", text}), 0) << error_;
    const std::size_t from = out_.find("F=");
    return out_.substr(from, out_.find('\n') - from);
  };
  EXPECT_EQ(times("F=2,B=3"), "F=2 B=3 I=1.5 W=1.5 send=0");
  EXPECT_EQ(times("I=1.25,W=.75"), "F=1 B=2 I=1.25 W=0.75 send=0");
  EXPECT_EQ(times("W=0.5,I=1,B=1.6,send=1e-2"), "F=1 B=1.6 I=1 W=0.5 send=0.01");
  EXPECT_THAT(times("send=0.5"), HasSubstr("B=2"));
  EXPECT_THAT(out_, HasSubstr("makespan 10,"));  // 9 and two transfers that do not overlap
}

TEST_F(ScheduleCommandTest, FilesThereAndBack) {
  ASSERT_EQ(run({"zb1p", "--ranks", "2", "--micro-batches", "4", "--csv", path("a.csv"), "--svg", path("a.svg")}), 0)
      << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("wrote " + path("a.csv") + "\n"), HasSubstr("wrote " + path("a.svg") + "\n")));
  EXPECT_THAT(read_file(path("a.csv")), StartsWith("0F0,0F1,2F0,2F1,2I0,2W0,"));
  EXPECT_THAT(read_file(path("a.svg")), AllOf(StartsWith("<svg "), HasSubstr("InterleavedZeroBubble: ")));
  const std::string printed = out_.substr(out_.find("\nrank"), out_.find("\nwrote") - out_.find("\nrank"));

  ASSERT_EQ(run({"--from", path("a.csv"), "--transfers", "--csv", path("b.csv"), "--validate", "--table"}), 0)
      << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("\na: 2 ranks, 4 stages, 4 micro-batches"), HasSubstr(printed),
                          HasSubstr("Step 01: 0SEND_F0 1F0"),
                          HasSubstr("valid: 48 passes, each once and after its inputs; 24 transfers, each sent and "
                                    "received in order; no deadlock, even where a send waits for its receive\n")));
  EXPECT_THAT(read_file(path("b.csv")), StartsWith("0F0,0SEND_F0,2RECV_F0,0F1,"));
  ASSERT_EQ(run({"--from", path("b.csv"), "--validate", "--max-live", "5"}), 0) << error_;
  EXPECT_THAT(out_, HasSubstr("live activations are within the bound on every rank"));
}

TEST_F(ScheduleCommandTest, ComparesAll) {
  ASSERT_EQ(run({"--compare", "--ranks", "4", "--micro-batches", "8"}), 0) << error_;
  EXPECT_THAT(out_,
              HasSubstr("schedule                stages a rank  makespan  bubble  live activations   / stages\n"
                        "GPipe                               1        33  27.3 %                 8          8\n"
                        "1F1B                                1        33  27.3 %                 4          4\n"
                        "Interleaved1F1B                     2      28.5  15.8 %                11        5.5\n"
                        "LoopedBFS                           2      28.5  15.8 %                16          8\n"
                        "InterleavedZeroBubble               2      25.5   5.9 %                 8          4\n"
                        "ZBVZeroBubble                       2      25.5   5.9 %                 8          4\n"
                        "DualPipeV                           2        27  11.1 %                 9        4.5\n"));
  // A schedule that does not support this size gives the reason, below the others.
  ASSERT_EQ(run({"--compare", "--ranks", "4", "--micro-batches", "4", "--stages-per-rank", "3"}), 0) << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("DualPipeV                           -         -       -"),
                          HasSubstr("schedule DualPipeV: micro-batches >= stages does not hold: 4 < 8"),
                          HasSubstr("Interleaved1F1B                     3")));
  EXPECT_EQ(run({"--compare", "--ranks", "0", "--micro-batches", "4"}), 2);
  EXPECT_THAT(error_, HasSubstr("0 ranks: expected 1 to"));
}

TEST_F(ScheduleCommandTest, HelpHasExamples) {
  EXPECT_EQ(run({"--help"}), 0);
  EXPECT_THAT(out_, AllOf(StartsWith("usage: phalanx schedule NAME --ranks P --micro-batches M"),
                          HasSubstr("phalanx schedule --compare --ranks 4 --micro-batches 8\n")));
}

TEST_F(ScheduleCommandTest, WrongInputIsOneErrorAndTheRightStatus) {
  write_file(path("cell.csv"), "0F0,0B0\n1F0,1X0\n");
  write_file(path("wrong.csv"), "0F0,0B0\n1B0,1F0\n");
  const Arguments size = {"--ranks", "4", "--micro-batches", "8"};
  const auto with_size = [&](Arguments more) {
    more.insert(more.end(), size.begin(), size.end());
    return more;
  };
  struct Case {
    Arguments arguments;
    int status;
    std::string message;
  };
  const std::vector<Case> cases = {
      {{}, 2, "expected one of NAME (GPipe, 1F1B,"},
      {{"1F1B"}, 2, "expected --ranks P and --micro-batches M"},
      {{"1F1B", "--ranks", "4"}, 2, "expected --ranks P and --micro-batches M"},
      {{"1F1B", "--ranks"}, 2, "--ranks needs a value"},
      {{"1F1B", "--ranks", "four", "--micro-batches", "8"}, 2, "--ranks is 'four': expected a whole number"},
      {{"1F1B", "--ranks", "4", "--micro-batches", "3"}, 2, "micro-batches >= stages does not hold: 3 < 4"},
      {with_size({"1F2B"}), 2, "unknown pipeline schedule '1F2B' (did you mean '1F1B'?)"},
      {with_size({"1F1B", "GPipe"}), 2, "unexpected argument 'GPipe'"},
      {with_size({"1F1B", "--tabel"}), 2, "unknown option '--tabel' (did you mean '--table'?)"},
      {with_size({"1F1B", "--ranks", "2"}), 2, "--ranks is given twice: expected it once"},
      {with_size({"1F1B", "--table=yes"}), 2, "--table takes no value"},
      {with_size({"1F1B", "--step", "99999999999999999999"}), 2, "'99999999999999999999': the number is too large"},
      {{"1F1B", "--ranks", "99999999999", "--micro-batches", "8"},
       2,
       "--ranks is '99999999999': the number is too large"},
      {with_size({"1F1B", "--validate", "--max-live", "4,x"}), 2, "--max-live has 'x': expected whole numbers"},
      {with_size({"ZBV", "--stages-per-rank", "3"}), 2, "3 stages a rank: expected 2"},
      {with_size({"ZBV", "--stages-per-rank", "0"}), 2, "--stages-per-rank is 0: expected 1 or more"},
      {with_size({"1F1B", "--times", "F=1,C=2"}), 2, "--times has 'C=2'"},
      {with_size({"1F1B", "--times", "F=1,snd=2"}), 2, "--times has 'snd=2' (did you mean 'send'?)"},
      {with_size({"1F1B", "--times", "F"}), 2, "--times has 'F': expected F=, B=, I=, W= and send="},
      {with_size({"1F1B", "--times", "F=1,"}), 2, "--times has ''"},
      {with_size({"1F1B", "--times", "F=-1"}), 2, "--times has 'F=-1': expected a number, 0 or more"},
      {with_size({"1F1B", "--times", "F=nan"}), 2, "--times has 'F=nan': expected a number"},
      {with_size({"1F1B", "--compare"}), 2, "expected one of NAME"},
      {with_size({"--compare", "--table"}), 2, "--compare prints its table only"},
      {with_size({"--from", "x.csv"}), 2, "are what the file of --from says"},
      {with_size({"1F1B", "--max-live", "4"}), 2, "--max-live is checked by --validate"},
      {with_size({"1F1B", "--validate", "--max-live", "4,4"}), 2, "--max-live has 2 numbers: expected one for all"},
      {with_size({"GPipe", "--validate", "--max-live", "4"}), 2, "rank 0, position 4, 0F4: makes 5 live activations"},
      {{"--from", path("none.csv")}, 1, "none.csv"},
      {{"--from", path("cell.csv")}, 2, "cell.csv: line 2, cell 2: '1X0' is no action: unknown kind 'X'"},
      {{"--from", path("wrong.csv")}, 2, "schedule wrong is wrong in 1 place\n  rank 1, position 0, 1B0: needs 1F0"},
      {{"--from", path("wrong.csv"), "--validate"}, 2, "rank 1, position 0, 1B0: needs 1F0 before it"},
      {with_size({"1F1B", "--svg", path("no/x.svg")}), 1, "no/x.svg"},
  };
  for (const Case& test : cases) {
    EXPECT_EQ(run(test.arguments), test.status) << test.message;
    EXPECT_THAT(error_, AllOf(StartsWith("phalanx schedule: "), HasSubstr(test.message)));
    EXPECT_THAT(out_, Not(HasSubstr("valid:")));
  }
  // With --table the actions of the file are shown, so that the user can compare them with the error.
  EXPECT_EQ(run({"--from", path("wrong.csv"), "--table"}), 2);
  EXPECT_THAT(out_, HasSubstr("Step 0: 0F0    1B0\nStep 1: 0B0    1F0\n"));
}

// Traces of ranks that ran exactly 1F1B, with F = 10 ms, B = 20 ms and transfers of 1 ms. There are two parallel
// pipelines, ranks 0, 2 and ranks 1, 3; the second is slower by a fifth.
class ExecutedScheduleTest : public ScheduleCommandTest {
 protected:
  void write_traces(std::int64_t step, bool with_passes = true) {
    const auto plan = schedule::make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 2});
    const schedule::Times times{.common = {.forward = 0.010, .backward = 0.020}, .by_stage = {}, .transfer = 0.001};
    const auto simulation = schedule::simulate(plan, times);
    const auto begin = observe::TraceRecorder::Clock::now();
    for (int rank = 0; rank < 4; ++rank) {
      const auto stage = static_cast<std::size_t>(rank / 2);
      const double factor = rank % 2 == 0 ? 1.0 : 1.2;
      observe::TraceRecorder trace({.rank = rank});
      const auto at = [&](double seconds) {
        return begin + std::chrono::nanoseconds(static_cast<std::int64_t>(1e9 * factor * seconds));
      };
      for (std::size_t i = 0; with_passes && i < plan.actions[stage].size(); ++i) {
        const auto& span = simulation.spans[stage][i];
        trace.span(schedule::to_text(plan.actions[stage][i]), "pass", at(span.start), at(span.end));
      }
      trace.span("step " + std::to_string(step), "step", at(0), at(1));
      write_file(path("rank" + std::to_string(rank) + "_trace.json"), trace.to_json());
    }
  }
};

TEST_F(ExecutedScheduleTest, TheSlowestPipelineBesideItsSimulation) {
  write_traces(10);
  ASSERT_EQ(run({"--executed", folder(), "--svg", path("step.svg")}), 0) << error_;
  EXPECT_THAT(out_, AllOf(StartsWith("step 10, the slowest of 2 pipelines: ranks 1, 3\n1F1B: 2 ranks, 2 stages, "),
                          HasSubstr("\n    1     1     12.000     24.000          -          -\n"),
                          HasSubstr("\na transfer 1.")));
  EXPECT_THAT(out_, HasSubstr("\nwrote "));
  EXPECT_THAT(read_file(path("step.svg")), HasSubstr("1F1B, simulated: "));
  ASSERT_EQ(run({"--executed", folder(), "--step", "10"}), 0) << error_;

  // `phalanx trace analyze` gives the same result.
  const std::string expected = out_;
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(run_command({"trace", "", kTraceHelp, trace_command}, {"analyze", folder()}), 0);
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), expected);
}

TEST_F(ExecutedScheduleTest, Refusals) {
  EXPECT_EQ(run({"--executed", path("none")}), 1);
  EXPECT_THAT(error_, HasSubstr("none does not exist"));
  write_traces(10, /*with_passes=*/false);
  EXPECT_EQ(run({"--executed", folder()}), 1);
  EXPECT_THAT(error_, HasSubstr("step 10 of rank 0 has no passes of a pipeline"));
  write_traces(10);
  EXPECT_EQ(run({"--executed", folder(), "--step", "9"}), 1);
  EXPECT_THAT(error_, HasSubstr("step 9 is not in the traces of all ranks: they have 10"));
  write_file(path("gpipe.csv"), "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
  EXPECT_EQ(run({"--executed", folder(), "--from", path("gpipe.csv")}), 2);
  EXPECT_THAT(error_, HasSubstr("what ran is not schedule gpipe: rank 1, pass 1: expected 1F1, found 1B0"));
  std::filesystem::remove(path("rank3_trace.json"));
  EXPECT_EQ(run({"--executed", folder()}), 1);
  EXPECT_THAT(error_, HasSubstr("the trace of a rank is missing"));
  EXPECT_EQ(run({"--executed", folder(), "--ranks", "4"}), 2);
  EXPECT_THAT(error_, HasSubstr("--executed goes together with --step, --from and --svg only"));
  EXPECT_EQ(run({"1F1B", "--ranks", "4", "--micro-batches", "4", "--step", "3"}), 2);
  EXPECT_THAT(error_, HasSubstr("--step is one of the traces of --executed FOLDER"));
}

}  // namespace
}  // namespace phalanx::cli
