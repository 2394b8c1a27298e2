#include "phalanx/report/run_marks.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "phalanx/base/testing/matchers.h"

namespace phalanx::report {
namespace {

using nlohmann::json;

/// The ranks that wrote their memory: 1 up to a step, 2 after it.
MetricsFile two_ranks_after(std::int64_t step) {
  MetricsFile metrics;
  for (std::int64_t i = 1; i <= 20; ++i) metrics.ranks.add(i, i <= step ? 1 : 2);
  return metrics;
}

TEST(RunMarks, AResumeSaysItsLayoutAndWhatChanged) {
  const json run = {{"begun", {{"layout", "2 ranks"}}},
                    {"history",
                     {{{"step", 10},
                       {"time", 50.5},
                       {"layout", "1 rank"},
                       {"changes",
                        {{{"key", "[optimizer] lr"}, {"saved", 0.002}, {"now", 0.001}},
                         {{"key", "x"}, {"now", "y"}, {"note", "why"}}}}},
                      {{"step", 1200}, {"layout", "1 rank"}, {"changes", json::array()}}}}};
  const RunMarks found = run_marks(run, {});
  ASSERT_THAT(found.marks, SizeIs(2));
  EXPECT_THAT(found.notes, IsEmpty());
  EXPECT_EQ(found.marks[0].step, 10);
  EXPECT_EQ(found.marks[0].time, 50.5);
  EXPECT_TRUE(found.marks[0].layout_changed);
  EXPECT_TRUE(found.marks[0].on_curve);
  EXPECT_THAT(found.marks[0].changes, ElementsAre("[optimizer] lr: 0.002 → 0.001", "x: not set → \"y\": why"));
  EXPECT_EQ(found.marks[0].text(),
            "resumed after step 10; layout: 2 ranks → 1 rank; [optimizer] lr: 0.002 → 0.001; x: not set → \"y\": why");
  EXPECT_FALSE(found.marks[1].layout_changed);
  EXPECT_EQ(found.marks[1].text(), "resumed after step 1,200; layout: 1 rank, as before");
}

TEST(RunMarks, AResumeThatTheRunLaterWentBackBehindIsNotOnTheCurve) {
  const json run = {{"begun", {{"layout", "A"}}},
                    {"history",
                     {{{"step", 10}, {"layout", "B"}},
                      {{"step", 20}, {"layout", "C"}},
                      {{"step", 20}, {"layout", "D"}},
                      {{"step", 5}, {"layout", "D"}},
                      {{"step", 8}, {"layout", "D"}}}},
                    {"branches", {{{"step", 5}}, "?"}}};
  const std::vector<RunMark> marks = run_marks(run, {}).marks;
  ASSERT_THAT(marks, SizeIs(5));
  EXPECT_EQ(marks[0].layout, "A → B");
  EXPECT_EQ(marks[1].layout, "B → C");
  EXPECT_EQ(marks[2].layout, "B → D");  // the second start from the same step: what the first one did is gone
  EXPECT_EQ(marks[3].layout, "A → D");  // the steps before it were made by A
  EXPECT_EQ(marks[4].layout, "D, as before");
  EXPECT_THAT((std::vector<bool>{marks[0].on_curve, marks[1].on_curve, marks[2].on_curve, marks[3].on_curve,
                                 marks[4].on_curve}),
              ElementsAre(false, false, false, true, true));
  EXPECT_EQ(marks[3].note, "rolled back to it");
  EXPECT_EQ(marks[4].note, "");
}

TEST(RunMarks, OfOlderFilesTheNumberOfRanksTellsTheLayout) {
  const json older = {{"history", {{{"step", 10}, {"changes", json::array()}}}}};
  RunMark mark = run_marks(older, two_ranks_after(10)).marks.at(0);
  EXPECT_TRUE(mark.layout_changed);
  EXPECT_EQ(mark.layout, "1 rank → 2 ranks (as metrics.jsonl tells)");
  const std::vector<RunMark> same = run_marks(older, two_ranks_after(0)).marks;
  ASSERT_THAT(same, SizeIs(1));
  EXPECT_FALSE(same[0].layout_changed);
  EXPECT_EQ(same[0].layout, "");

  // Begun by an older version, continued by this one.
  const json continued = {{"history", {{{"step", 10}, {"layout", "2 ranks, data parallel"}}}}};
  EXPECT_EQ(run_marks(continued, two_ranks_after(10)).marks.at(0).layout,
            "1 rank → 2 ranks, data parallel (as metrics.jsonl tells)");
  mark = run_marks(continued, two_ranks_after(0)).marks.at(0);
  EXPECT_FALSE(mark.layout_changed);
  EXPECT_EQ(mark.layout, "2 ranks, data parallel (the one before is not recorded)");
}

// Memory was written after steps 4 and 9 alone. Without layouts in run.json nothing says which resume changed it.
TEST(RunMarks, AChangeOfRanksBetweenSeveralResumesBelongsToNoneForCertain) {
  MetricsFile metrics;
  metrics.ranks.add(4, 1);
  metrics.ranks.add(9, 2);
  const auto marks = [&](const json& history) { return run_marks({{"history", history}}, metrics).marks; };
  std::vector<RunMark> found = marks({{{"step", 5}}, {{"step", 7}, {"layout", "B"}}, {{"step", 9}}});
  ASSERT_THAT(found, SizeIs(3));
  const std::string change = "1 rank → 2 ranks at this resume or at another one after step 4 (as metrics.jsonl tells)";
  EXPECT_EQ(found[0].layout, change);
  EXPECT_EQ(found[1].layout, "B; " + change);
  EXPECT_EQ(found[2].layout, "");
  for (const RunMark& mark : found) EXPECT_FALSE(mark.layout_changed);

  // The second resume changed nothing, so the first one did.
  found = marks({{{"step", 5}, {"layout", "B"}}, {{"step", 7}, {"layout", "B"}}});
  EXPECT_EQ(found[0].layout, "1 rank → B (as metrics.jsonl tells)");
  EXPECT_TRUE(found[0].layout_changed);
  EXPECT_EQ(found[1].layout, "B, as before");

  // The curve does not have the first two resumes: the run went back behind them.
  found = marks({{{"step", 5}}, {{"step", 8}}, {{"step", 4}}});
  EXPECT_EQ(found[0].layout, "");
  EXPECT_EQ(found[1].layout, "");
  EXPECT_EQ(found[2].layout, "1 rank → 2 ranks (as metrics.jsonl tells)");
}

TEST(RunMarks, AChangeOfRanksWithoutAResumeIsMarked) {
  const std::vector<RunMark> marks = run_marks(json::object(), two_ranks_after(7)).marks;
  ASSERT_THAT(marks, SizeIs(1));
  EXPECT_EQ(marks[0].step, 7);
  EXPECT_FALSE(marks[0].resumed);
  EXPECT_EQ(marks[0].text(),
            "changed after step 7, run.json has no resume here; layout: 1 rank → 2 ranks (as metrics.jsonl tells)");
}

TEST(RunMarks, UnreadableEntriesAreNoted) {
  const json run = {{"history", {1, {{"step", "10"}}, {{"step", 1.5}}, {{"step", 3}, {"changes", 7}, {"time", "x"}}}}};
  RunMarks found = run_marks(run, {});
  EXPECT_THAT(found.marks, SizeIs(1));
  EXPECT_THAT(found.notes, ElementsAre(HasSubstr("3 entries of \"history\" without an integer \"step\"")));
  found = run_marks({{"history", 3}, {"begun", 4}}, {});
  EXPECT_THAT(found.marks, IsEmpty());
  EXPECT_THAT(found.notes, ElementsAre(HasSubstr("\"history\" is no list")));
}

}  // namespace
}  // namespace phalanx::report
