// Schedules as text: actions, CSV files and tables in the forms of torch.distributed.pipelining.
//
// An action is `[stage][kind][micro-batch]`: `2F0`, `1B3`, `0I2`, `0W2`, `1SEND_F3`, `2RECV_F3`, `1SEND_B3`,
// `0RECV_B3`; UNSHARD, RESHARD and REDUCE_GRAD have no micro-batch (`0UNSHARD`); `(0F1;3B0)OVERLAP_F_B` has parts.
//
// A CSV file has one line per rank, rank 0 first, and one cell per action. An empty cell is a slot in which the rank
// waits. Waiting follows from the order of the actions, so such cells are skipped when read and none are written. The
// ranks of the stages and the number of micro-batches follow from the actions. A stage belongs to the rank with most of
// its passes, so that one action on a wrong rank is left for validate() (validate.h) to name. Files written by torch's
// _dump_csv(), with or without transfers, can be read; torch's _load_csv() can read the result of to_csv().
//
// Throws ConfigError for malformed text. It names file, line and cell, what was expected and what was found.
//
//   Schedule schedule = read_csv("mine.csv");
//   write_file("copy.csv", to_csv(schedule));
//   fmt::print("{}", to_table(schedule));
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

/// "F", "B", "I", "W", "SEND_F", "OVERLAP_F_B", ...
std::string_view to_text(ActionKind kind);
/// "2F0", "(0F1;3B0)OVERLAP_F_B".
std::string to_text(const Action& action);
/// The reverse. Blanks around the text are skipped.
Action parse_action(std::string_view text);

struct CsvOptions {
  std::string name;  // of the schedule
  std::string file;  // for error messages
};

std::string to_csv(const Schedule& schedule);
Schedule parse_csv(std::string_view text, const CsvOptions& options = {});
/// The schedule is named after the file, without its folder and extension.
Schedule read_csv(const std::filesystem::path& path);

/// A row per step, a column per rank, each rank's actions one below the other without gaps:
///
///           Rank 0 Rank 1
///   Step 0: 0F0    1F0
///   Step 1: 0F1    1B0
std::string to_table(const Schedule& schedule);
/// The same for any cells: columns[rank][step], empty if the rank waits.
std::string to_table(const std::vector<std::vector<std::string>>& columns);

}  // namespace phalanx::schedule
