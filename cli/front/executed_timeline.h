// A step of a pipeline, from the traces that a training run wrote: for `phalanx schedule --executed` and for `phalanx
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
  std::vector<int> ranks;  // of the world: those of the pipeline that took longest
  int pipelines = 1;       // side by side
  schedule::Timeline timeline;
};

struct ExecutedStepOptions {
  std::optional<std::int64_t> step;            // the last one of the traces
  std::optional<schedule::Schedule> schedule;  // what ran, where it is not one of the known ones
};

/// Throws an Error for traces without passes, and for a step that is not in all of them.
ExecutedStep executed_step(const std::vector<observe::TraceFile>& traces, const ExecutedStepOptions& options = {});

/// The tables of `phalanx schedule --executed`, on standard output.
void print_executed(const ExecutedStep& executed);

}  // namespace phalanx::cli
