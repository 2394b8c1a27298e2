// What the keys of a configuration say together: settings that contradict each other, and token budgets, which become
// numbers of sequences. Checks that need the number of ranks are in run_plan.h.
//
//   check_keys_together(config, /*wrong_keys=*/{}, problems);
#pragma once

#include <set>
#include <string>

#include "phalanx/config/config.h"
#include "phalanx/config/config_problems.h"

namespace phalanx::train {

/// A check of `wrong_keys` (read_keys() gives them) is left out: it would speak of their defaults.
void check_keys_together(TrainConfig& config, const std::set<std::string>& wrong_keys, ConfigProblems& problems);

/// What a run needs and other uses of a configuration do not.
void require_dump_folder(const TrainConfig& config);
void require_dataset(const TrainConfig& config);

}  // namespace phalanx::train
