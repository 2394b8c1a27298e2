// For commands that run a model on one rank or, with -n, on several.
#pragma once

#include <cstdint>
#include <string>

#include "cli/command.h"

namespace phalanx::cli {

/// Takes -n out of the arguments and starts so many ranks of the worker's command `name`, or becomes its only one, or
/// one of a launcher's. `parts`: ranks that one copy of the model needs. Throws UsageError where the two do not fit.
int run_in_ranks(const std::string& name, Arguments arguments, std::int64_t parts);

/// The arguments without -n.
Arguments without_rank_count(Arguments arguments);

}  // namespace phalanx::cli
