// For commands whose work is done by ranks: one, some that -n starts on this machine, or those of a launcher.
//
//   const RankCount count = take_rank_count(arguments);     // -n 4
//   ...                                                     // what can be refused before ranks are started
//   return run_ranks("train", arguments, count);
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"

namespace phalanx::cli {

struct RankCount {
  std::optional<int> started;  // by -n; nothing: this process is a rank itself
  bool launched = false;       // by a launcher, before
  int world = 1;
};

/// Takes -n, --nproc-per-node out of the arguments. UsageError where a launcher has started this process already.
RankCount take_rank_count(Arguments& arguments);

/// UsageError unless the ranks make whole copies of a model that is cut by --tp and --pp.
void check_copies(std::int64_t tp, std::int64_t pp, const RankCount& count);

/// Starts the ranks, as the worker's command `name`, and waits for them; or becomes one, and does not return.
/// stop_signals: as in SupervisorOptions.
int run_ranks(const std::string& name, const Arguments& arguments, const RankCount& count,
              const std::vector<int>& stop_signals = {});

}  // namespace phalanx::cli
