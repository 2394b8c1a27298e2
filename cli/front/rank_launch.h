// Starts the ranks of a command: one rank, several that -n starts on this node, or those of a launcher.
//
//   const RankCount count = rank_count(parsed.ranks);     // -n 4
//   ...                                                   // checks that can fail before ranks are started
//   return run_ranks("train", arguments, count);
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/model_arguments.h"

namespace phalanx::cli {

struct RankCount {
  std::optional<int> started;  // the value of -n; unset: this process is a rank itself
  bool launched = false;       // a launcher has started this process
  int world = 1;
};

/// `ranks`: the value of -n, "" if it is not given. Throws UsageError if -n is given and a launcher has started this
/// process already.
RankCount rank_count(const std::string& ranks);

/// The ranks of a command that runs a model. Throws UsageError unless they are a multiple of
/// the tp * pp ranks of a copy.
RankCount model_rank_count(const ModelArguments& parsed);

/// Starts the ranks with the worker's command `name` and waits for them. Or this process becomes a rank, and the call
/// does not return. stop_signals: as in SupervisorOptions.
int run_ranks(const std::string& name, const Arguments& arguments, const RankCount& count,
              const std::vector<int>& stop_signals = {});

}  // namespace phalanx::cli
