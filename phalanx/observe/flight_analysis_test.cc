// Which rank the analysis blames, from files like those of flight recorders.
#include "phalanx/observe/flight_analysis.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <numeric>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::observe {
namespace {

// One rank of a job and what it did.
class Rank {
 public:
  Rank(int rank, int size) : rank_(rank), size_(size) {
    std::vector<int> all(static_cast<std::size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    join("world", "world", all);
  }

  Rank& join(const std::string& name, const std::string& id, const std::vector<int>& members) {
    int place = 0;
    while (members[static_cast<std::size_t>(place)] != rank_) ++place;
    groups_.push_back(std::make_unique<FlightRecorder>(FlightRecorderOptions{.group = name,
                                                                             .id = id,
                                                                             .rank = place,
                                                                             .size = static_cast<int>(members.size()),
                                                                             .members = members,
                                                                             .capacity = 8}));
    return *this;
  }

  Rank& issue(FlightEntry entry, std::size_t group = 0) {
    entry.seq = issued_[group]++;
    if (entry.peer == FlightEntry::kNone) entry.collective = collectives_[group]++;
    groups_[group]->issued(entry);
    return *this;
  }
  Rank& wait_in(FlightEntry entry, std::size_t group = 0) {
    issue(entry, group);
    groups_[group]->started(issued_[group] - 1);
    return *this;
  }
  Rank& do_all(FlightEntry entry, std::size_t group = 0) {
    wait_in(entry, group);
    groups_[group]->finished(issued_[group] - 1);
    return *this;
  }
  Rank& fail_in(FlightEntry entry, std::size_t group = 0) {
    wait_in(entry, group);
    groups_[group]->failed(issued_[group] - 1);
    return *this;
  }

  std::string json(const std::string& reason) const {
    const auto now = std::chrono::duration_cast<std::chrono::microseconds>(
                         std::chrono::system_clock::now().time_since_epoch() + std::chrono::seconds(30))
                         .count();
    std::vector<std::string> groups;
    for (const auto& one : groups_) groups.push_back(one->to_json());
    return fmt::format(
        R"({{"rank": {}, "size": {}, "host": "node", "pid": 7, "written_us": {}, "reason": "{}", "groups": [{}]}})",
        rank_, size_, now, reason, fmt::join(groups, ","));
  }

 private:
  int rank_, size_;
  std::vector<std::unique_ptr<FlightRecorder>> groups_;
  std::map<std::size_t, std::uint64_t> issued_;
  std::map<std::size_t, std::int64_t> collectives_;
};

FlightEntry reduce(std::int64_t count, std::string_view dtype = "float32") {
  return {.verb = "all_reduce", .dtype = dtype, .count = count, .op = "sum"};
}
const FlightEntry kBarrier{.verb = "barrier"};

class FlightAnalysisTest : public ::testing::Test {
 protected:
  void write(int rank, const Rank& what, const std::string& reason = "SIGQUIT") const {
    write_file(path(fmt::format("rank_{}.json", rank)), what.json(reason));
  }
  FlightAnalysis analyze() const { return analyze_flight_files(read_flight_files(folder_.path())); }
  std::filesystem::path path(const std::string& name) const { return folder_.path() / name; }
  std::string refusal() const {
    return error_text([&] { analyze(); });
  }

  TempDirectory folder_{"flight-analysis"};
};

TEST_F(FlightAnalysisTest, TheRankThatIsBehindIsNamed) {
  for (const int rank : {0, 2, 3}) write(rank, Rank(rank, 4).do_all(kBarrier).do_all(reduce(4)).wait_in(reduce(8)));
  write(1, Rank(1, 4).do_all(kBarrier).do_all(reduce(4)));
  const FlightAnalysis found = analyze();
  EXPECT_THAT(found.verdict, ::testing::MatchesRegex(
                                 "Ranks 0, 2, 3 are at op 2 of group 'world', all_reduce\\(float32\\[8\\], sum\\), "
                                 "waiting for 30\\.. s, and rank 1 is missing: its last there is op 1, "
                                 "all_reduce\\(float32\\[4\\], sum\\), finished 30\\.. s before it wrote its file\\."));
  ASSERT_EQ(found.groups.size(), 1u);
  EXPECT_EQ(found.groups[0].match_state, FlightMatchState::absent);
  ASSERT_EQ(found.groups[0].standings.size(), 2u);
  EXPECT_THAT(found.groups[0].standings[0].ranks, ElementsAre(0, 2, 3));
  EXPECT_EQ(found.groups[0].standings[1].number, 1);
  EXPECT_THAT(to_text(found),
              AllOf(HasSubstr("group 'world' of ranks 0 to 3: op 2 is incomplete\n"),
                    HasSubstr("\n  rank 1                1  finished   "), HasSubstr("\n  ranks 0 to 3: SIGQUIT\n")));
}

TEST_F(FlightAnalysisTest, ARankThatHasIssuedNothingOrHasLeftTheGroupIsMissingToo) {
  write(0, Rank(0, 3).join("dp", "world/0.1", {0, 1}).wait_in(reduce(8), 1));
  write(1, Rank(1, 3).join("dp", "world/0.1", {0, 1}));
  write(2, Rank(2, 3));
  EXPECT_THAT(analyze().verdict, AllOf(HasSubstr("at op 0 of group 'dp'"), HasSubstr("rank 1 is missing: it has issued "
                                                                                     "nothing in that group.")));
  write(1, Rank(1, 3));
  EXPECT_THAT(analyze().verdict, HasSubstr("it has no communicator of that group, not yet or not any more"));
}

TEST_F(FlightAnalysisTest, DifferentCallsOfOneOperationAreLaidSideBySide) {
  const std::map<std::string, FlightEntry> others = {
      {"all_reduce(float64[8], sum)", reduce(8, "float64")},
      {"all_reduce(float32[9], sum)", reduce(9)},
      {"barrier()", kBarrier},
      {"broadcast(float32[8], root 1)", {.verb = "broadcast", .dtype = "float32", .count = 8, .root = 1}}};
  for (const auto& [call, entry] : others) {
    write(0, Rank(0, 3).do_all(kBarrier).fail_in(reduce(8)));
    write(1, Rank(1, 3).do_all(kBarrier).fail_in(entry));
    write(2, Rank(2, 3).do_all(kBarrier).fail_in(reduce(8)));
    EXPECT_EQ(analyze().verdict,
              "The ranks do not call the same operation as op 1 of group 'world': ranks 0, 2 called "
              "all_reduce(float32[8], sum); rank 1 called " +
                  call + ".");
  }
  // If counts may differ, they are not a mismatch.
  const auto uneven = [](std::int64_t count) {
    return FlightEntry{.verb = "all_to_all", .dtype = "uint8", .count = count, .uneven = true};
  };
  for (int rank = 0; rank < 3; ++rank) write(rank, Rank(rank, 3).do_all(uneven(rank)));
  EXPECT_EQ(analyze().verdict, "Nothing is stuck: all ranks have finished all operations of 1 group.");
  for (int rank = 0; rank < 3; ++rank)
    write(rank, Rank(rank, 3).do_all({.verb = "all_gather", .dtype = "uint8", .count = rank, .uneven = true}));
  EXPECT_EQ(analyze().groups[0].match_state, FlightMatchState::mismatch);  // the total is the same on all
}

TEST_F(FlightAnalysisTest, ARankWithoutAFileIsTold) {
  write(0, Rank(0, 3).do_all(kBarrier).fail_in(reduce(8)), "rank 1 has died");
  write(2, Rank(2, 3).do_all(kBarrier).fail_in(reduce(8)), "rank 1 has died");
  const FlightAnalysis found = analyze();
  EXPECT_THAT(found.ranks_without_file, ElementsAre(1));
  EXPECT_THAT(found.verdict,
              AllOf(HasSubstr("Ranks 0, 2 are at op 1 of group 'world'"), HasSubstr("which failed after"),
                    HasSubstr("and rank 1 is missing: it has left no file.")));
  EXPECT_THAT(to_text(found), AllOf(HasSubstr("no file"), HasSubstr("  ranks 0, 2: rank 1 has died\n")));
}

TEST_F(FlightAnalysisTest, NothingStuckIsSaid) {
  for (int rank = 0; rank < 2; ++rank) write(rank, Rank(rank, 2).do_all(kBarrier).do_all(reduce(8)));
  EXPECT_EQ(analyze().verdict, "Nothing is stuck: all ranks have finished all operations of 1 group.");
  EXPECT_THAT(to_text(analyze()), HasSubstr("group 'world' of ranks 0, 1: all finished\n"));
  // Files from different times.
  write(1, Rank(1, 2).do_all(kBarrier));
  EXPECT_THAT(analyze().verdict, HasSubstr("Nobody waits in group 'world', but rank 1 is behind: op 0 is the last"));
  // A ring that has overwritten old entries.
  Rank long_run(0, 2), other(1, 2);
  for (int i = 0; i < 20; ++i) {
    long_run.do_all(reduce(8));
    if (i < 11) other.do_all(reduce(8));
  }
  write(0, long_run);
  write(1, other.wait_in(reduce(8)));
  EXPECT_THAT(analyze().verdict, HasSubstr("Rank 1 is still in op 11 of group 'world'"));
}

TEST_F(FlightAnalysisTest, TheGroupWhoseMissingRankWaitsForNobodyIsTheCause) {
  // World waits for ranks 2 and 3, which wait in their group for rank 1, which computes.
  write(0, Rank(0, 4).join("tp", "world/0.0", {0}).wait_in(reduce(8)));
  write(1, Rank(1, 4).join("tp", "world/0.1", {1, 2, 3}));
  for (const int rank : {2, 3}) {
    write(rank, Rank(rank, 4).join("tp", "world/0.1", {1, 2, 3}).wait_in(reduce(4), 1));
  }
  const FlightAnalysis found = analyze();
  EXPECT_THAT(found.verdict,
              AllOf(HasSubstr("at op 0 of group 'tp'"), HasSubstr("rank 1 is missing"), Not(HasSubstr("each other"))));
  ASSERT_EQ(found.groups.size(), 3u);
  EXPECT_EQ(found.groups[0].id, "world/0.1");
  EXPECT_EQ(found.groups[1].name, "world");
  EXPECT_THAT(found.groups[1].sentence,
              HasSubstr("rank 2: it waits in op 0 of group 'tp', all_reduce(float32[4], sum)"));
  EXPECT_EQ(found.groups[2].match_state, FlightMatchState::none);
}

TEST_F(FlightAnalysisTest, ACircleIsToldWhole) {
  write(0, Rank(0, 2).join("b", "world/0.0", {0, 1}).wait_in(kBarrier));
  write(1, Rank(1, 2).join("b", "world/0.0", {0, 1}).wait_in(reduce(4), 1));
  EXPECT_THAT(
      analyze().verdict,
      AllOf(HasSubstr("The ranks wait for each other."), HasSubstr("Rank 0 is at op 0 of group 'world', barrier()"),
            HasSubstr("rank 1 is missing: it waits in op 0 of group 'b', all_reduce(float32[4], sum)"),
            HasSubstr("rank 0 is missing: it waits in op 0 of group 'world', barrier()")));
}

TEST_F(FlightAnalysisTest, ACollectiveThatMeetsAMessage) {
  write(0, Rank(0, 2).wait_in(kBarrier));
  write(1, Rank(1, 2).wait_in({.verb = "recv", .dtype = "int64", .count = 3, .peer = 0, .tag = 7}));
  EXPECT_THAT(analyze().verdict,
              HasSubstr("rank 1 is missing: it waits in recv(int64[3] from rank 0, tag 7) of group"));
}

TEST_F(FlightAnalysisTest, AMessageNobodySends) {
  // In a group whose ranks differ from the ranks in the job.
  const FlightEntry recv{.verb = "recv", .dtype = "int64", .count = 3, .peer = 1, .tag = 7};
  write(0, Rank(0, 4));
  write(1, Rank(1, 4).join("pp", "world/0.1", {1, 3}).wait_in(recv, 1));
  write(2, Rank(2, 4));
  write(3, Rank(3, 4).join("pp", "world/0.1", {1, 3}));
  EXPECT_EQ(
      analyze().verdict,
      "Rank 1 waits in recv(int64[3] from rank 3, tag 7) of group 'pp', and rank 3 has no such send under way: it "
      "has issued nothing in that group.");
  write(3, Rank(3, 4)
               .join("pp", "world/0.1", {1, 3})
               .wait_in({.verb = "send", .dtype = "int64", .count = 3, .peer = 0, .tag = 7}, 1));
  EXPECT_THAT(analyze().verdict, HasSubstr("of group 'pp', which rank 3 has issued too."));
}

TEST_F(FlightAnalysisTest, AFailureAfterEverybodyCameTellsWhoCameLast) {
  write(0, Rank(0, 2).fail_in(reduce(8)), "timed out");
  write(1, Rank(1, 2).fail_in(reduce(8)), "rank 0 of group 'world': timed out");
  const FlightAnalysis found = analyze();
  EXPECT_EQ(found.groups[0].match_state, FlightMatchState::failed);
  EXPECT_THAT(found.verdict,
              AllOf(HasSubstr("Every rank has issued op 0 of group 'world', all_reduce(float32[8], sum), "
                              "and it failed: rank 1 came last, "),
                    HasSubstr(" after rank 0, when rank 0 had given up.")));
  EXPECT_EQ(found.reasons.size(), 2u);
  // Calls after the failure, while the ranks end in different ways, are not a mismatch.
  write(0, Rank(0, 2).fail_in(reduce(8)).fail_in(kBarrier));
  write(1, Rank(1, 2).fail_in(reduce(8)).fail_in(reduce(3)));
  EXPECT_EQ(analyze().groups[0].match_state, FlightMatchState::failed);
}

TEST_F(FlightAnalysisTest, WhatIsNoRecordingIsRefusedByName) {
  EXPECT_THAT(refusal(), HasSubstr("holds no flight recorder file (*.json)"));
  std::filesystem::create_directory(path("comm_traces"));
  EXPECT_THAT(refusal(), HasSubstr("did you mean " + path("comm_traces").string() + "?"));
  EXPECT_THROW(read_flight_files(path("nowhere")), Error);
  write_file(path("rank_0.json"), "{\"rank\": 0, ");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("rank_0.json is no flight recorder file: not valid JSON at column 13"),
                               Not(HasSubstr("json.exception"))));
  EXPECT_THROW(read_flight_files(path("rank_0.json")), Error);
  write_file(path("rank_0.json"), "[]");
  EXPECT_THAT(refusal(), HasSubstr("rank_0.json is no flight recorder file: expected a JSON object, found array"));
  write_file(path("rank_0.json"), "{\"size\": 2}");
  EXPECT_THAT(refusal(), HasSubstr("rank_0.json is no flight recorder file: it has no \"rank\""));
  write_file(path("rank_0.json"), "{\"rank\": 0, \"size\": \"two\"}");
  EXPECT_THAT(refusal(),
              HasSubstr("rank_0.json is no flight recorder file: it: \"size\" is \"two\": expected a whole"));
  write_file(path("rank_0.json"), Rank(0, 2).json("x").replace(0, 10, "{\"rank\": 2"));
  EXPECT_THAT(refusal(), HasSubstr("rank 2 of 2"));
  std::string odd = Rank(0, 2).do_all(kBarrier).json("x");
  odd.replace(odd.find("finished"), 8, "melted");
  write_file(path("rank_0.json"), odd);
  EXPECT_THAT(refusal(), HasSubstr("unknown state 'melted'"));
  write(0, Rank(0, 2));
  write_file(path("again.json"), Rank(0, 2).json("x"));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("are both of rank 0"), HasSubstr("again.json")));
  write_file(path("again.json"), Rank(1, 3).json("x"));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("a run of 3 ranks"), HasSubstr("of one of 2")));
  write_file(path("again.json"), Rank(1, 2).join("dp", "a", {1, 0}).json("x"));
  write(0, Rank(0, 2).join("dp", "a", {0, 1}));
  EXPECT_THAT(refusal(), HasSubstr("of different runs: group 'dp' has other members"));
}

TEST(FlightAnalysisText, RunsOfRanksAreShort) {
  EXPECT_EQ(ranks_text({3}), "rank 3");
  EXPECT_EQ(ranks_text({0, 1}), "ranks 0, 1");
  EXPECT_EQ(ranks_text({0, 1, 2, 5, 7, 8, 9}), "ranks 0 to 2, 5, 7 to 9");
}

}  // namespace
}  // namespace phalanx::observe
