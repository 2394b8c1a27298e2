#include "phalanx/schedule/transfers.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/validate.h"

namespace phalanx::schedule {
namespace {

TEST(Transfers, OneForwardOneBackwardOfTwoRanks) {
  const Schedule schedule = add_transfers(make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 2}));
  EXPECT_EQ(to_csv(schedule),
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n");
  EXPECT_TRUE(has_transfers(schedule));
}

TEST(Transfers, NothingIsSentWithinARank) {
  EXPECT_FALSE(has_transfers(add_transfers(make_schedule({.name = "ZBV", .ranks = 1, .micro_batches = 3}))));
  // At the bottom of the V stages 1 and 2 are on rank 1.
  const std::string csv = to_csv(add_transfers(make_schedule({.name = "ZBV", .ranks = 2, .micro_batches = 3})));
  EXPECT_THAT(csv, HasSubstr("0SEND_F0"));
  EXPECT_THAT(csv, HasSubstr("2SEND_F0"));
  EXPECT_EQ(csv.find("1SEND_F"), std::string::npos);
  EXPECT_EQ(csv.find("2SEND_B"), std::string::npos);
}

// For every schedule and many sizes: it is valid, free of deadlock however sends behave, sends and receives of a pair
// of ranks are in one order, and only transfers are added.
TEST(Transfers, NoDeadlockWhateverTheTransport) {
  int schedules = 0;
  for (const std::string& name : schedule_names()) {
    for (const int ranks : {1, 2, 3, 4, 6}) {
      for (int micro_batches = 1; micro_batches <= 14; ++micro_batches) {
        for (int stages = 1; stages <= 3; ++stages) {
          Schedule passes;
          try {
            passes = make_schedule(
                {.name = name, .ranks = ranks, .stages_per_rank = stages, .micro_batches = micro_batches});
          } catch (const ConfigError&) {
            continue;  // a size that it does not have
          }
          ++schedules;
          const Schedule schedule = add_transfers(passes);
          ASSERT_THAT(validate(schedule, {.transport = Transport::rendezvous}), IsEmpty()) << to_csv(schedule);
          std::map<std::pair<int, int>, std::vector<std::string>>
              of_pair;  // [rank, other rank], as the sender names it
          Schedule stripped = schedule;
          for (int rank = 0; rank < ranks; ++rank) {
            auto& row = stripped.actions[static_cast<std::size_t>(rank)];
            for (const Action& action : row) {
              if (!is_transfer(action.kind)) continue;
              const Action other = other_end(action);
              of_pair[{rank, rank_of(schedule, other.stage)}].push_back(to_text(is_send(action.kind) ? action : other));
            }
            std::erase_if(row, [](const Action& action) { return is_transfer(action.kind); });
          }
          EXPECT_EQ(stripped, passes);
          for (const auto& [pair, order] : of_pair) {
            EXPECT_EQ(order, (of_pair[{pair.second, pair.first}])) << to_csv(schedule);
          }
        }
      }
    }
  }
  EXPECT_GT(schedules, 400);
}

std::vector<std::string> row_of(const Schedule& schedule, std::size_t rank) {
  std::vector<std::string> texts;
  for (const Action& action : schedule.actions[rank]) texts.push_back(to_text(action));
  return texts;
}

TEST(Transfers, UnshardsAheadAndReducesAtTheEnd) {
  const Schedule passes = make_schedule({.name = "LoopedBFS", .ranks = 1, .stages_per_rank = 3, .micro_batches = 1});
  EXPECT_THAT(row_of(add_transfers(passes, {.unshard_stages = 1}), 0),
              ElementsAre("0UNSHARD", "0F0", "0RESHARD", "1UNSHARD", "1F0", "1RESHARD", "2UNSHARD", "2F0", "2B0",
                          "2RESHARD", "1UNSHARD", "1B0", "1RESHARD", "0UNSHARD", "0B0", "0RESHARD"));
  EXPECT_THAT(
      row_of(add_transfers(passes, {.unshard_stages = 2, .reduce_gradients = true}), 0),
      ElementsAre("0UNSHARD", "1UNSHARD", "0F0", "0RESHARD", "2UNSHARD", "1F0", "2F0", "2B0", "2REDUCE_GRAD",
                  "2RESHARD", "0UNSHARD", "1B0", "1REDUCE_GRAD", "1RESHARD", "0B0", "0REDUCE_GRAD", "0RESHARD"));
  // More than there are: all are unsharded once.
  EXPECT_THAT(row_of(add_transfers(passes, {.unshard_stages = 9}), 0),
              ElementsAre("0UNSHARD", "1UNSHARD", "2UNSHARD", "0F0", "1F0", "2F0", "2B0", "2RESHARD", "1B0", "1RESHARD",
                          "0B0", "0RESHARD"));
  for (const std::string& name : schedule_names()) {
    for (const int ahead : {0, 1, 2, 3, 5}) {
      const Schedule schedule = add_transfers(make_schedule({.name = name, .ranks = 4, .micro_batches = 8}),
                                              {.unshard_stages = ahead, .reduce_gradients = true});
      EXPECT_THAT(validate(schedule, {.transport = Transport::rendezvous}), IsEmpty()) << name << " " << ahead;
    }
  }
}

TEST(Transfers, WhatIsThereAlreadyIsRefused) {
  const Schedule passes = make_schedule({.name = "1F1B", .ranks = 2, .micro_batches = 2});
  const auto message = [](const Schedule& schedule, const TransferOptions& options) {
    return error_text<ConfigError>([&] { add_transfers(schedule, options); });
  };
  EXPECT_EQ(message(add_transfers(passes), {}),
            "schedule 1F1B has SEND and RECV actions already: expected one in which none are placed");
  Schedule reduced = passes;
  for (int rank = 0; rank < 2; ++rank) {
    reduced.actions[static_cast<std::size_t>(rank)].push_back({rank, ActionKind::reduce_gradients, -1, {}});
  }
  EXPECT_THAT(message(reduced, {.reduce_gradients = true}), HasSubstr("has REDUCE_GRAD actions already"));
  EXPECT_EQ(message(reduced, {}), "");  // they stay where they are
  EXPECT_THAT(message(passes, {.unshard_stages = -1}), HasSubstr("unshard_stages is -1"));
  Schedule wrong = passes;
  wrong.actions[1].pop_back();
  EXPECT_THAT(message(wrong, {}), HasSubstr("1B1: it is missing"));
}

}  // namespace
}  // namespace phalanx::schedule
