// Starts the ranks of a command: one rank, several that -n starts on this node, or those of a launcher.
//
//   const RankCount count = take_rank_count(arguments);     // -n 4
//   ...                                                     // checks that can fail before ranks are started
//   return run_ranks("train", arguments, count);
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"

namespace phalanx::cli {

struct RankCount {
  std::optional<int> started;  // the value of -n; unset: this process is a rank itself
  bool launched = false;       // a launcher has started this process
  int world = 1;
};

/// Removes -n, --nproc-per-node from the arguments. Throws UsageError if -n is given and a launcher has started this
/// process already.
RankCount take_rank_count(Arguments& arguments);

/// Throws UsageError unless the number of ranks is a multiple of the tp * pp ranks of one copy of the model.
void check_copies(std::int64_t tp, std::int64_t pp, const RankCount& count);

/// Starts the ranks with the worker's command `name` and waits for them. Or this process becomes a rank, and the call
/// does not return. stop_signals: as in SupervisorOptions.
int run_ranks(const std::string& name, const Arguments& arguments, const RankCount& count,
              const std::vector<int>& stop_signals = {});

}  // namespace phalanx::cli
