// One step of a pipeline, read from the traces of a training run. Used by `phalanx schedule --executed` and `phalanx
// trace analyze`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "phalanx/observe/trace_file.h"
#include "phalanx/schedule/timeline.h"

namespace phalanx::cli {

struct ExecutedStep {
  std::int64_t step = 0;
  std::vector<int> ranks;  // world ranks of the pipeline that took longest
  int pipelines = 1;       // number of parallel pipelines
  schedule::Timeline timeline;
};

struct ExecutedStepOptions {
  std::optional<std::int64_t> step;            // unset: the last step of the traces
  std::optional<schedule::Schedule> schedule;  // the schedule that ran, if it is not one of the known ones
};

/// Throws Error if the traces have no passes, or if the step is not in all of them.
ExecutedStep executed_step(const std::vector<observe::TraceFile>& traces, const ExecutedStepOptions& options = {});

/// Prints the tables of `phalanx schedule --executed` on standard output.
void print_executed(const ExecutedStep& executed);

}  // namespace phalanx::cli
