#include "phalanx/schedule/validate.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/transfers.h"

namespace phalanx::schedule {
namespace {

std::vector<std::string> faults(const Schedule& schedule, const ValidateOptions& options = {}) {
  std::vector<std::string> texts;
  for (const Fault& fault : validate(schedule, options)) texts.push_back(fault.text());
  return texts;
}
std::vector<std::string> faults(const std::string& csv, const ValidateOptions& options = {}) {
  return faults(parse_csv(csv), options);
}

TEST(Validate, WhatIsRightIsRight) {
  EXPECT_THAT(faults("0F0,0B0\n1F0,1B0\n"), IsEmpty());
  EXPECT_THAT(faults("0F0,0I0,0W0\n1F0,1B0\n"), IsEmpty());
  EXPECT_THAT(faults("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"), IsEmpty());
  EXPECT_THAT(faults("0F0,0F1\n1F0,1F1\n"), IsEmpty());  // for evaluation
}

TEST(Validate, PassesThatAreMissingOrThereTwice) {
  EXPECT_THAT(faults("0F0,0B0\n1F0\n"), ElementsAre("rank 1, 1B0: it is missing, and so are its halves I and W"));
  EXPECT_THAT(faults("0F0,0F1,0B0,0B1\n1F0,1B0,1B1\n"), Contains("rank 1, 1F1: it is missing"));
  EXPECT_THAT(faults("0F0,0I0\n1F0,1B0\n"), ElementsAre("rank 0, 0W0: it is missing, though I is there"));
  EXPECT_THAT(faults("0F0,0W0\n1F0,1B0\n"), Contains("rank 0, 0I0: it is missing, though W is there"));
  EXPECT_THAT(faults("0F0,0B0,0F0\n1F0,1B0\n"),
              ElementsAre("rank 0, position 2, 0F0: for the second time: position 0 has it, too"));
  EXPECT_THAT(faults("0F0,0B0,0W0\n1F0,1B0\n"),
              Contains("rank 0, position 2, 0W0: the whole backward pass is there, too, at position 1"));
  EXPECT_THAT(faults("0F0,0B0\n1F0,1B0,0F1,0B1\n"), Contains("rank 1, position 2, 0F1: stage 0 is on rank 0"));
}

TEST(Validate, InputsComeFirst) {
  EXPECT_THAT(faults("0B0,0F0\n1F0,1B0\n"),
              Contains("rank 0, position 0, 0B0: needs 0F0 before it, which comes at position 1"));
  EXPECT_THAT(faults("0F0,0W0,0I0\n1F0,1B0\n"),
              ElementsAre("rank 0, position 1, 0W0: needs 0I0 before it, which comes at position 2"));
  // Neighbouring stages on one rank.
  EXPECT_THAT(faults("1F0,0F0,1B0,0B0\n"),
              ElementsAre("rank 0, position 0, 1F0: needs 0F0 before it, which comes at position 1"));
  EXPECT_THAT(faults("0F0,1F0,0B0,1I0,1W0\n"),
              ElementsAre("rank 0, position 2, 0B0: needs 1I0 before it, which comes at position 3"));
  EXPECT_THAT(faults("0F0,(1F0;1B0)OVERLAP_F_B,0B0\n"),
              ElementsAre("rank 0, position 1, 1B0: needs 1F0, which is part of the same overlap"));
}

TEST(Validate, TransfersMatch) {
  const std::string right = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n";
  EXPECT_THAT(faults("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"),
              ElementsAre("rank 0, 0SEND_F0: it is missing: stage 1 on rank 1 needs what 0F0 makes",
                          "rank 1, position 0, 1RECV_F0: its other end, 0SEND_F0 on rank 0, is missing"));
  EXPECT_THAT(faults("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n"),
              ElementsAre("rank 0, position 1, 0SEND_F0: its other end, 1RECV_F0 on rank 1, is missing",
                          "rank 1, position 0, 1F0: needs 1RECV_F0 before it, which is missing"));
  EXPECT_THAT(faults("0F0,0SEND_F0,0B0,0RECV_B0\n1F0,1RECV_F0,1SEND_B0,1B0\n"),
              ElementsAre("rank 0, position 2, 0B0: needs 0RECV_B0 before it, which comes at position 3",
                          "rank 1, position 0, 1F0: needs 1RECV_F0 before it, which comes at position 1",
                          "rank 1, position 2, 1SEND_B0: needs 1B0 before it, which comes at position 3"));
  EXPECT_THAT(faults("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1B0,1SEND_B0\n"),
              ElementsAre("rank 1, position 2, 1SEND_F0: there is no stage 2 to exchange with"));
  EXPECT_THAT(faults("0F0,0SEND_F0,1F0,1B0,0B0\n"),
              ElementsAre("rank 0, position 1, 0SEND_F0: stage 1 is on the same rank: nothing is to be sent"));
  EXPECT_THAT(faults(right), IsEmpty());

  EXPECT_THAT(faults("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                     "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"),
              ElementsAre("rank 1, position 0, 1RECV_F1: out of order: as number 0 rank 0 sends 0SEND_F0, to be "
                          "received by 1RECV_F0"));
}

TEST(Validate, DeadlocksNameWhoWaitsForWhat) {
  // Each rank first needs what the other does last.
  EXPECT_THAT(faults("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"),
              ElementsAre("rank 0, position 1, 0B0: deadlock: waits for ever for 1B0, at position 2 of rank 1 which "
                          "waits itself, at position 1, 1F1",
                          "rank 1, position 1, 1F1: deadlock: waits for ever for 0F1, at position 2 of rank 0 which "
                          "waits itself, at position 1, 0B0"));
  // Fine if a send does not wait for its receive.
  const std::string csv =
      "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0F3,0RECV_B0,0B0,0SEND_F3,0RECV_B1,0B1,0RECV_B2,0B2,0RECV_B3,0B3\n"
      "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1RECV_F2,1F2,1B2,1SEND_B2,1RECV_F3,1F3,1B3,1SEND_B3\n";
  EXPECT_THAT(faults(csv), IsEmpty());
  EXPECT_THAT(faults(csv, {.transport = Transport::rendezvous}),
              ElementsAre("rank 0, position 7, 0RECV_B0: deadlock, a cycle of waits: rank 0's 0RECV_B0 runs behind "
                          "0SEND_F2; rank 0's 0SEND_F2 waits for 1RECV_F2; rank 1's 1RECV_F2 runs behind 1SEND_B0; "
                          "rank 1's 1SEND_B0 waits for 0RECV_B0"));
}

TEST(Validate, ShardingActions) {
  const std::string rank1 = "1UNSHARD,1F0,1B0,1RESHARD,1REDUCE_GRAD\n";
  EXPECT_THAT(faults("0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD\n" + rank1), IsEmpty());
  EXPECT_THAT(faults("0F0,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD\n" + rank1),
              ElementsAre("rank 0, position 0, 0F0: needs 0UNSHARD before it"));
  EXPECT_THAT(faults("0UNSHARD,0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n" + rank1),
              ElementsAre("rank 0, position 1, 0UNSHARD: the stage is whole already, from position 0"));
  EXPECT_THAT(faults("0UNSHARD,0F0,0B0,0RESHARD,0RESHARD,0REDUCE_GRAD\n" + rank1),
              ElementsAre("rank 0, position 4, 0RESHARD: the stage is not whole: no UNSHARD before it"));
  EXPECT_THAT(faults("0UNSHARD,0F0,0B0,0REDUCE_GRAD\n" + rank1),
              ElementsAre("rank 0, 0RESHARD: it is missing after 0UNSHARD at position 0"));
  EXPECT_THAT(faults("0UNSHARD,0F0,0REDUCE_GRAD,0B0,0RESHARD\n" + rank1),
              ElementsAre("rank 0, position 3, 0B0: comes after 0REDUCE_GRAD at position 2"));
  EXPECT_THAT(faults("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD,0RESHARD\n" + rank1),
              ElementsAre("rank 0, position 4, 0REDUCE_GRAD: for the second time: position 3 has it, too"));
  EXPECT_THAT(faults("0UNSHARD,0F0,0B0,0RESHARD\n" + rank1),
              ElementsAre("rank 0, 0REDUCE_GRAD: it is missing, other stages have it"));
}

TEST(Validate, MemoryBound) {
  const Schedule gpipe = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 4});
  EXPECT_THAT(faults(gpipe, {.max_live_activations = {4, 4}}), IsEmpty());
  EXPECT_THAT(faults(gpipe, {.max_live_activations = {3, 4}}),
              ElementsAre("rank 0, position 3, 0F3: makes 4 live activations, the rank may have 3"));
  EXPECT_THAT(faults(make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 4}), {.max_live_activations = {2, 1}}),
              IsEmpty());
  EXPECT_THROW(validate(gpipe, {.max_live_activations = {3}}), ConfigError);
}

TEST(Validate, NumbersOutOfRange) {
  Schedule schedule = parse_csv("0F0,0B0\n1F0,1B0\n");
  schedule.actions[0][0].micro_batch = 7;
  EXPECT_THAT(faults(schedule), ElementsAre("rank 0, position 0, 0F7: there are micro-batches 0 to 0"));
  schedule.actions[0][0] = {9, ActionKind::forward, 0, {}};
  EXPECT_THAT(faults(schedule), ElementsAre("rank 0, position 0, 9F0: there are stages 0 to 1"));
  schedule.actions[0][0] = {-1, ActionKind::overlap, -1, {}};
  EXPECT_THAT(faults(schedule), ElementsAre("rank 0, position 0, ()OVERLAP_F_B: an overlap needs parts"));
  schedule.actions[0][0].sub_actions = {{0, ActionKind::send_forward, 0, {}}};
  EXPECT_THAT(faults(schedule), ElementsAre(HasSubstr("the parts of an overlap are passes: F, B, I or W")));
  schedule.actions[0][0] = {0, ActionKind::unshard, 3, {}};
  EXPECT_THAT(faults(schedule), ElementsAre(HasSubstr("this kind of action has no micro-batch")));
  schedule.rank_of_stage = {0, 5};
  EXPECT_THAT(faults(schedule), Contains(HasSubstr("stage 1 is said to be on rank 5: there are ranks 0 to 1")));
  EXPECT_THAT(faults(Schedule{}), ElementsAre(HasSubstr("at least one stage and one micro-batch")));
}

TEST(Validate, CheckThrowsAListOfFaults) {
  EXPECT_NO_THROW(check(parse_csv("0F0,0B0\n")));
  try {
    check(parse_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", {.name = "mine"}));
    FAIL() << "expected a ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "schedule mine is wrong in 1 place\n  rank 1, 1B1: it is missing, and so are its halves I and W");
  }
  Schedule empty = make_schedule({.name = "GPipe", .ranks = 2, .micro_batches = 1000});
  empty.actions[1].clear();
  try {
    check(empty);
    FAIL() << "expected a ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("schedule GPipe is wrong in at least 1000 places\n"));
    EXPECT_THAT(error.what(), HasSubstr("\n  and 992 more"));
  }
}

}  // namespace
}  // namespace phalanx::schedule
