// The key figures of a run, as its report shows them: steps, losses, tokens, time, parameters.
#pragma once

#include "phalanx/report/differences.h"
#include "phalanx/report/run_folder.h"

namespace phalanx::report {

/// Names, with their units, and values. What the run's files do not tell is left out.
NamedValues key_figures(const RunFolder& run);

/// "2026-11-26 18:52:21 UTC"; "" for 0, the unknown time, and for times that no calendar has.
std::string utc_text(double seconds_since_epoch);

}  // namespace phalanx::report
