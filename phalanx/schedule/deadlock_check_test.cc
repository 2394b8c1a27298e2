// The posted transfers complete on every backend, for every schedule; and an order that deadlocks is named.
#include "phalanx/schedule/deadlock_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/posting.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/transfers.h"

namespace phalanx::schedule {
namespace {

// "0F0 {0SEND_F0 0RECV_B1} 0B1"
std::string text_of_program(const Program& program) {
  std::string text;
  for (const Step& step : program) {
    std::vector<std::string> names;
    for (const Action& transfer : step.transfers) names.push_back(to_text(transfer));
    text += (text.empty() ? "" : " ") +
            (names.empty() ? to_text(step.action) : fmt::format("{{{}}}", fmt::join(names, " ")));
  }
  return text;
}

std::vector<std::string> deadlock_faults(const Schedule& schedule, const PostingOptions& posting,
                                         const BackendModel& backend_model = {}) {
  std::vector<std::string> texts;
  for (const Fault& fault : check_deadlock(schedule, post(schedule, posting), backend_model))
    texts.push_back(fault.text());
  return texts;
}

std::optional<Schedule> with_transfers_if_any(const ScheduleOptions& options) {
  try {
    return add_transfers(make_schedule(options));
  } catch (const ConfigError&) {
    return std::nullopt;  // a size that it does not have
  }
}

// visit(schedule, what it is): every schedule that 2, 4 and 8 ranks can have with up to 16 micro-batches.
int for_each_schedule(const std::function<void(const Schedule&, const std::string&)>& visit) {
  int count = 0;
  for (const std::string& name : schedule_names()) {
    for (const int ranks : {2, 4, 8}) {
      for (int micro_batches = 1; micro_batches <= 16; ++micro_batches) {
        for (const int stages : {1, 2, 3}) {
          const auto schedule = with_transfers_if_any(
              {.name = name, .ranks = ranks, .stages_per_rank = stages, .micro_batches = micro_batches});
          if (!schedule) continue;
          ++count;
          visit(*schedule,
                fmt::format("{}, {} ranks, {} stages a rank, {} micro-batches", name, ranks, stages, micro_batches));
        }
      }
    }
  }
  return count;
}

TEST(DeadlockCheck, WhatIsPostedComesToItsEnd) {
  const PostingOptions one = posting_for(/*has_tags=*/false), two{.groups = true, .communicators = 2};
  const PostingOptions tagged = posting_for(/*has_tags=*/true);
  const int count = for_each_schedule([&](const Schedule& whole, const std::string& what) {
    for (const Schedule& schedule : {whole, forward_only(whole)}) {
      for (const bool rendezvous : {true, false}) {
        const BackendModel in_order{.rendezvous = rendezvous};
        ASSERT_THAT(deadlock_faults(schedule, one, in_order), IsEmpty()) << what;
        // Two communicators, launched in the order of posting: on a device with room for both, and for one.
        ASSERT_THAT(deadlock_faults(schedule, two, in_order), IsEmpty()) << what;
        ASSERT_THAT(deadlock_faults(schedule, two, {.rendezvous = rendezvous, .one_at_a_time = true}), IsEmpty())
            << what;
        ASSERT_THAT(deadlock_faults(schedule, tagged, {.rendezvous = rendezvous, .in_order = false}), IsEmpty())
            << what;
      }
    }
  });
  EXPECT_GT(count, 250);
}

TEST(DeadlockCheck, ReceivesPostedAheadDeadlockWithoutTags) {
  const PostingOptions ahead{.receives_ahead = 1};
  const auto schedule = *with_transfers_if_any({.name = "1F1B", .ranks = 2, .micro_batches = 4});
  EXPECT_THAT(deadlock_faults(schedule, ahead, {.in_order = false}), IsEmpty());
  EXPECT_THAT(deadlock_faults(schedule, ahead),
              ElementsAre("rank 0, position 5, 0B0: deadlock, a cycle of waits: rank 0's 0B0 waits for 0RECV_B0; rank "
                          "0's 0RECV_B0 waits for 1SEND_B0; rank 1's 1SEND_B0 runs behind 1RECV_F2; rank 1's 1RECV_F2 "
                          "waits for 0SEND_F2, which rank 0 has not come to"));
  // The reason is the order, not the lack of buffers.
  for (const bool rendezvous : {true, false}) {
    for (const std::string& name : schedule_names()) {
      const bool is_gpipe = name == "GPipe";
      for (const int ranks : {2, 4, 8}) {
        const auto long_one = *with_transfers_if_any({.name = name, .ranks = ranks, .micro_batches = 16});
        const auto found = deadlock_faults(long_one, ahead, {.rendezvous = rendezvous});
        if (is_gpipe && ranks == 2) {
          EXPECT_THAT(found, IsEmpty());
        } else {
          EXPECT_THAT(found, ElementsAre(HasSubstr("deadlock, a cycle of waits: rank "))) << name << ranks;
        }
      }
      const auto short_one = with_transfers_if_any({.name = name, .ranks = 2, .micro_batches = name == "1F1B" ? 3 : 2});
      if (short_one && !is_gpipe) {
        EXPECT_FALSE(deadlock_faults(*short_one, ahead, {.rendezvous = rendezvous}).empty()) << name;
      }
    }
  }
}

TEST(Posting, WithoutTagsSendsAndTheReceiveBehindThemAreOneGroup) {
  const auto schedule = *with_transfers_if_any({.name = "1F1B", .ranks = 2, .micro_batches = 3});
  const auto programs = post(schedule, posting_for(/*has_tags=*/false));
  EXPECT_EQ(text_of_program(programs[0]),
            "0F0 {0SEND_F0} 0F1 {0SEND_F1 0RECV_B0} 0B0 0F2 {0SEND_F2 0RECV_B1} 0B1 {0RECV_B2} 0B2");
  EXPECT_EQ(text_of_program(programs[1]),
            "{1RECV_F0} 1F0 {1RECV_F1} 1B0 {1SEND_B0} 1F1 {1RECV_F2} 1B1 {1SEND_B1} 1F2 1B2 {1SEND_B2}");
  EXPECT_TRUE(programs[1][0].waits_for_shape);
  EXPECT_FALSE(programs[1][2].waits_for_shape);
}

TEST(Posting, WithTagsReceivesArePostedAhead) {
  const auto schedule = *with_transfers_if_any({.name = "1F1B", .ranks = 2, .micro_batches = 3});
  const auto programs = post(schedule, posting_for(/*has_tags=*/true));
  // Not the very first receive, whose shape is not known.
  EXPECT_EQ(text_of_program(programs[0]),
            "0F0 {0SEND_F0} 0F1 {0SEND_F1} {0RECV_B0} {0RECV_B1} 0B0 0F2 {0SEND_F2} {0RECV_B2} 0B1 0B2");
  EXPECT_EQ(text_of_program(programs[1]),
            "{1RECV_F0} {1RECV_F1} 1F0 {1RECV_F2} 1B0 {1SEND_B0} 1F1 1B1 {1SEND_B1} 1F2 1B2 {1SEND_B2}");
}

TEST(Posting, TwoCommunicators) {
  const Schedule schedule = parse_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n");
  EXPECT_EQ(text_of_program(post(schedule, {.groups = true})[0]), "0F0 {0SEND_F0 0RECV_B0} 0B0");
  const Program program = post(schedule, {.groups = true, .communicators = 2})[0];
  EXPECT_EQ(text_of_program(program), "0F0 {0SEND_F0} {0RECV_B0} 0B0");
  EXPECT_EQ(program[1].communicator, 0);
  EXPECT_EQ(program[2].communicator, 1);
}

TEST(Posting, ForwardOnly) {
  const auto schedule = forward_only(*with_transfers_if_any({.name = "ZBV", .ranks = 2, .micro_batches = 2}));
  EXPECT_EQ(to_csv(schedule),
            "0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1\n"
            "1RECV_F0,1F0,1RECV_F1,2F0,2SEND_F0,1F1,2F1,2SEND_F1\n");
}

TEST(DeadlockCheck, RanksThatSendToEachOtherFirstMeetInAGroup) {
  // 0SEND_F1 and 1SEND_B0 come before the receives that match them.
  const Schedule schedule = parse_csv(
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n");
  EXPECT_THAT(deadlock_faults(schedule, posting_for(/*has_tags=*/false)), IsEmpty());
  EXPECT_THAT(deadlock_faults(schedule, {}),
              ElementsAre("rank 0, position 4, 0RECV_B0: deadlock, a cycle of waits: rank 0's 0RECV_B0 runs behind "
                          "0SEND_F1; rank 0's 0SEND_F1 waits for 1RECV_F1; rank 1's 1RECV_F1 runs behind 1SEND_B0; "
                          "rank 1's 1SEND_B0 waits for 0RECV_B0"));
  EXPECT_THAT(deadlock_faults(schedule, {}, {.rendezvous = false}), IsEmpty());
  EXPECT_THAT(deadlock_faults(schedule, {.communicators = 2}), IsEmpty());
  EXPECT_THAT(deadlock_faults(schedule, {.communicators = 2}, {.one_at_a_time = true}),
              ElementsAre(HasSubstr("deadlock, a cycle of waits")));
}

TEST(DeadlockCheck, AGradientComesAfterTheOutputWhoseShapeItHas) {
  const Schedule schedule = parse_csv("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n");
  EXPECT_THAT(validate(schedule), IsEmpty());
  EXPECT_THAT(deadlock_faults(schedule, posting_for(/*has_tags=*/true), {.in_order = false}),
              ElementsAre("rank 0, position 0, 0RECV_B0: stage 0 has sent no output before it, whose shape it has: "
                          "place it later"));
}

TEST(DeadlockCheck, WithoutTagsBothEndsNameMessagesInOneOrder) {
  const auto schedule = *with_transfers_if_any({.name = "GPipe", .ranks = 2, .micro_batches = 2});
  auto programs = post(schedule, posting_for(/*has_tags=*/false));
  ASSERT_EQ(text_of_program(programs[1]).substr(0, 26), "{1RECV_F0} 1F0 {1RECV_F1} ");
  std::swap(programs[1][0].transfers, programs[1][2].transfers);
  const auto faults = check_deadlock(schedule, programs);
  ASSERT_EQ(faults.size(), 1U);
  EXPECT_EQ(faults[0].text(), "rank 1, position 2, 1RECV_F1: out of order: as number 0 rank 0 sends 0SEND_F0");
}

}  // namespace
}  // namespace phalanx::schedule
