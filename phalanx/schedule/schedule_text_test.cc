#include "phalanx/schedule/schedule_text.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::schedule {
namespace {

TEST(ScheduleText, EveryKindOfActionThereAndBack) {
  const std::vector<std::pair<std::string, Action>> cases = {
      {"2F0", {2, ActionKind::forward, 0, {}}},
      {"1B3", {1, ActionKind::backward, 3, {}}},
      {"0I2", {0, ActionKind::backward_input, 2, {}}},
      {"0W2", {0, ActionKind::backward_weight, 2, {}}},
      {"1SEND_F3", {1, ActionKind::send_forward, 3, {}}},
      {"2RECV_F3", {2, ActionKind::recv_forward, 3, {}}},
      {"1SEND_B3", {1, ActionKind::send_backward, 3, {}}},
      {"0RECV_B3", {0, ActionKind::recv_backward, 3, {}}},
      {"0UNSHARD", {0, ActionKind::unshard, -1, {}}},
      {"12RESHARD", {12, ActionKind::reshard, -1, {}}},
      {"0REDUCE_GRAD", {0, ActionKind::reduce_gradients, -1, {}}},
      {"(0F1;3B0)OVERLAP_F_B",
       {-1, ActionKind::overlap, -1, {{0, ActionKind::forward, 1, {}}, {3, ActionKind::backward, 0, {}}}}},
      {"15F127", {15, ActionKind::forward, 127, {}}},
  };
  for (const auto& [text, action] : cases) {
    EXPECT_EQ(to_text(action), text);
    EXPECT_EQ(parse_action(text), action) << text;
    EXPECT_EQ(parse_action(" " + text + "\r"), action) << text;
  }
  EXPECT_EQ(parse_action("( 0F1 ; 3B0 )OVERLAP_F_B"), cases[11].second);
}

TEST(ScheduleText, MalformedActionsSayWhatIsWrong) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"F0", "'F0' is no action: it does not begin with the number of a stage"},
      {"2", "'2' is no action: the kind is missing"},
      {"2G0", "unknown kind 'G'"},
      {"2SEND_G0", "unknown kind 'SEND_G' (did you mean 'SEND_F'?)"},
      {"2f0", "unknown kind 'f' (did you mean 'F'?)"},
      {"2F", "F needs a micro-batch"},
      {"2F0x", "its micro-batch '0x' is not a number from 0 to 999999"},
      {"2F1 3", "its micro-batch '1 3' is not a number"},
      {"2F99999999999", "its micro-batch '99999999999' is not a number from 0 to 999999"},
      {"99999999999F0", "its stage '99999999999' is not a number from 0 to 999999"},
      {"-1F0", "does not begin with the number of a stage"},
      {"0UNSHARD3", "UNSHARD takes no micro-batch, found '3'"},
      {"0OVERLAP_F_B", "OVERLAP_F_B stands behind its parts in brackets"},
      {"(0F1;3B0", "its '(' is not closed"},
      {"(0F1;3B0)OVERLAP", "OVERLAP_F_B should follow ')', found 'OVERLAP'"},
      {"(0F1;)OVERLAP_F_B", "one of its parts is empty"},
      {"()OVERLAP_F_B", "one of its parts is empty"},
      {"((0F1)OVERLAP_F_B)OVERLAP_F_B", "OVERLAP_F_B should follow ')'"},
      {"(0F1;(3B0)OVERLAP_F_B", "cannot be part of another"},
      {"(0F1;3X0)OVERLAP_F_B", "'3X0' is no action: unknown kind 'X'"},
  };
  for (const auto& [text, message] : cases) {
    EXPECT_THAT(error_text<ConfigError>([&] { parse_action(text); }),
                AllOf(HasSubstr(message), HasSubstr("such as 2F0, 1B3")))
        << text;
  }
}

TEST(ScheduleText, CsvThereAndBack) {
  const std::string csv = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
  const Schedule schedule = parse_csv(csv, {.name = "two"});
  EXPECT_EQ(schedule.name, "two");
  EXPECT_EQ(schedule.micro_batches, 2);
  EXPECT_EQ(schedule.rank_of_stage, (std::vector<int>{0, 1}));
  ASSERT_EQ(schedule.ranks(), 2);
  EXPECT_EQ(schedule.actions[1][1], (Action{1, ActionKind::backward, 0, {}}));
  EXPECT_EQ(to_csv(schedule), csv);

  // As Python's csv module and spreadsheets write it: CRLF, idle slots, quotes, a byte order mark, blank lines at the
  // end.
  EXPECT_EQ(parse_csv("\xEF\xBB\xBF"
                      "0F0,0F1,,\"0B0\",0B1\r\n,1F0, 1B0,1F1,1B1,,\r\n\r\n\n",
                      {.name = "two"}),
            schedule);
  EXPECT_EQ(parse_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", {.name = "two"}), schedule);
}

TEST(ScheduleText, StagesAndMicroBatchesAreReadFromTheActions) {
  // A V of two ranks, with transfers and an overlap.
  const Schedule v = parse_csv(
      "0F0,0SEND_F0,3F0,(0F1;3B0)OVERLAP_F_B,3SEND_B0\n1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,(1F1;2B0)OVERLAP_F_B\n");
  EXPECT_EQ(v.rank_of_stage, (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(v.micro_batches, 2);
  EXPECT_EQ(v.stages_of(0), (std::vector<int>{0, 3}));
  // One action on a wrong rank does not move the stage.
  EXPECT_EQ(parse_csv("0F0,0F1,0B0,0B1,1B1\n1F0,1F1,1B0\n").rank_of_stage, (std::vector<int>{0, 1}));
}

TEST(ScheduleText, MalformedCsvSaysFileLineAndCell) {
  const TempDirectory scratch("schedule-text");
  const auto path = scratch.path() / "mine.csv";
  write_file(path, "0F0,0B0\n1F0,,1BB0\n");
  EXPECT_THAT(error_text<ConfigError>([&] { read_csv(path); }),
              AllOf(HasSubstr("mine.csv: line 2, cell 3: '1BB0' is no action: unknown kind 'BB'"),
                    HasSubstr("expected [stage][kind][micro-batch]")));
  write_file(path, "0F0,0B0\n1F0,1B0\n");
  EXPECT_EQ(read_csv(path).name, "mine");
  EXPECT_THROW(read_csv(scratch.path() / "none.csv"), FileError);

  EXPECT_EQ(error_text<ConfigError>([] { parse_csv(""); }), "expected one line of actions a rank, found no line");
  EXPECT_EQ(error_text<ConfigError>([] { parse_csv("\n \r\n"); }),
            "expected one line of actions a rank, found no line");
  EXPECT_EQ(error_text<ConfigError>([] { parse_csv("0F0\n\n1F0\n"); }),
            "line 2: expected rank 1's actions, found none");
  EXPECT_EQ(error_text<ConfigError>([] { parse_csv("0F0\n,,\n", {.file = "x.csv"}); }),
            "x.csv: line 2: expected rank 1's actions, found none");
  EXPECT_EQ(error_text<ConfigError>([] { parse_csv("0F0\n2F0\n", {.file = "x.csv"}); }),
            "x.csv: stage 1 has no F, B, I or W on any rank: expected passes of every stage from 0 to 2");
  EXPECT_THAT(error_text<ConfigError>([] { parse_csv("0F0\n999999F0\n"); }), HasSubstr("stage 1 has no F"));
}

TEST(ScheduleText, Table) {
  const Schedule schedule = parse_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1REDUCE_GRAD\n");
  EXPECT_EQ(to_table(schedule),
            "        Rank 0 Rank 1\n"
            "Step 0: 0F0    1F0\n"
            "Step 1: 0F1    1B0\n"
            "Step 2: 0B0    1REDUCE_GRAD\n"
            "Step 3: 0B1\n");
  std::vector<std::vector<std::string>> columns(1);
  for (int i = 0; i < 11; ++i) columns[0].push_back(i == 10 ? "0B0" : "");
  EXPECT_THAT(to_table(columns), AllOf(HasSubstr("         Rank 0\nStep 00:\n"), HasSubstr("Step 10: 0B0\n")));
}

}  // namespace
}  // namespace phalanx::schedule
