// How evenly attention's work is spread over the ranks that share packed sequences, in words.
#pragma once

#include <string>

#include "phalanx/config/run_plan.h"
#include "phalanx/data/batch_source.h"

namespace phalanx::train {

/// Worst rank by mean, over sequences from all parts of the data, as many in a forward pass as in the run. Empty
/// without context parallelism, without documents, and for data that are no token files.
std::string context_balance_text(const data::BatchSource& data, const config::RunPlan& plan);

}  // namespace phalanx::train
