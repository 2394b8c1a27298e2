// Checks the keys of a configuration together: settings that contradict each other. It also converts token budgets to
// numbers of sequences. Checks that need the number of ranks are in run_plan.h.
//
//   check_keys_together(config, /*wrong_keys=*/{}, problems);
#pragma once

#include <set>
#include <string>

#include "phalanx/config/config.h"
#include "phalanx/config/config_problems.h"

namespace phalanx::config {

/// Checks that involve one of `wrong_keys` (from read_keys()) are skipped: they would see the keys' defaults.
void check_keys_together(TrainConfig& config, const std::set<std::string>& wrong_keys, ConfigProblems& problems);

/// Settings that a run needs, but other uses of a configuration do not.
void require_dump_folder(const TrainConfig& config);
void require_dataset(const TrainConfig& config);

}  // namespace phalanx::config
